"""Batch norm in code that is not captured, with the statistics of all ranks' samples.

In: kernels of batch norm that the user's model runs on this rank's share. Out: what one process would make of the whole
micro-batch, and gradients that go back through the statistics to all ranks. The formulas are those of captured steps.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import JobError
from plait.program.local import functions as local
from plait.run.eager.company import Company
from plait.torch_private.intercept import Takers, takable
from plait.torch_private.ops import OpOverload

aten = torch.ops.aten

_FORWARD = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
_BACKWARD = (aten.native_batch_norm_backward.default, aten.cudnn_batch_norm_backward.default)


class WholeStatistics:
    """Takes batch norm, and lets it meet the other ranks; also where checkpointing computes it again."""

    def __init__(self, company: Company, model: nn.Module) -> None:
        self._company = company
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {tensor.data_ptr(): name for name, tensor in named if tensor.numel()}
        self._turns = {name: turn for turn, (name, _) in enumerate(model.named_modules())}

    def takers(self) -> Takers:
        """For `intercepted`."""
        return ((batch_norms(), self._take),)

    def _take(self, op: OpOverload, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        if not given.get("training", given.get("train", True)):
            return call()
        return self._forward(given) if op in _FORWARD else self._backward(given)

    def _place(self, given: Mapping[str, Any], channels: int) -> tuple[str, int]:
        """The layer, by a tensor of its own, and its turn."""
        tensors = [given.get(name) for name in ("running_mean", "weight")]
        names = (self._names.get(t.data_ptr()) for t in tensors if t is not None)
        found = next((name for name in names if name is not None), None)
        turn = self._turns.get(found.rpartition(".")[0], 0) if found is not None else 0
        return f"batch norm {channels if found is None else found}", turn

    def _forward(self, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        x, weight, bias, eps = (*(given[name] for name in ("input", "weight", "bias")), _eps(given))
        channels, mean, var = x.shape[1], given["running_mean"], given["running_var"]
        like = next((entry for entry in (mean, weight) if entry is not None), x)
        own = local.batch_statistics(x, like).reshape(-1)
        place, turn = self._place(given, channels)
        rows = self._gather(f"{place} forward", x, own, turn)
        counts = [int(number) for number in rows[:, 0].tolist()]
        if sum(counts) == 1:
            raise JobError(
                f"batch norm needs more than one value per channel to train; a micro-batch gives it {tuple(x.shape)}.",
                fix="choose batch and accumulate so that no micro-batch, the last of an epoch too, has one sample.",
            )
        batch_mean, batch_var = local.combine_statistics(
            rows[:, 1:].to(like.dtype).view(-1, 2, channels), counts
        )
        momentum = given.get("momentum", given.get("exponential_average_factor"))
        assert momentum is not None
        if mean is not None and var is not None:
            mean.copy_(local.running_average(mean, batch_mean, momentum))
            var.copy_(local.running_variance(var, batch_var, momentum, sum(counts)))
        output = local.normalize(x, weight, bias, batch_mean, batch_var, eps)
        invstd = local.inverse_deviation(batch_var, eps)
        reserve = (x.new_empty(0, dtype=torch.uint8),) if "epsilon" in given else ()
        return output, batch_mean, invstd, *reserve

    def _backward(self, given: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # autograd would differentiate this rank's samples alone
            raise JobError(
                "the objective differentiates a gradient (create_graph=True) that goes through batch norm in code that"
                " could not be captured: over several ranks that would be wrong.",
                fix="use --plan single, a model that can be captured, or another norm.",
            )
        x, weight = given["input"], given["weight"]
        grad = given["grad_out"] if "grad_out" in given else given["grad_output"]
        mean = given["save_mean"]
        invstd = given["save_invstd"] if "save_invstd" in given else given["save_var"]
        own = local.gradient_sums(grad, x, mean, invstd, _eps(given))
        place, turn = self._place(given, x.shape[1])
        rows = self._gather(f"{place} backward", x, own.reshape(-1), -turn)
        sums = rows[:, 1:].sum(0).view(own.shape).to(own.dtype)
        wanted = given.get("output_mask", (True, weight is not None, weight is not None))
        grad_x = local.input_gradient(grad, x, weight, mean, invstd, sums, int(rows[:, 0].sum()))
        dtype = weight.dtype if weight is not None else mean.dtype
        return (
            grad_x if wanted[0] else None,
            own[0].to(dtype) if wanted[1] else None,
            own[1].to(dtype) if wanted[2] else None,
        )

    def _gather(self, place: str, x: Tensor, own: Tensor, turn: int) -> Tensor:
        """A row for each rank: its elements a channel, then its numbers."""
        count = own.new_tensor([x.numel() // max(x.shape[1], 1)], dtype=torch.float64)
        return self._company.gather(place, torch.cat((count, own.double())), turn)


@cache
def batch_norms() -> frozenset[OpOverload]:
    """All kernels of it, takable."""
    return takable((*_FORWARD, *_BACKWARD))


def _eps(given: Mapping[str, Any]) -> float:
    return float(given["eps"] if "eps" in given else given["epsilon"])
