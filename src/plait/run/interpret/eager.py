"""Models that cannot be captured: their forward and backward run eagerly, as one opaque instruction.

In: a rank's share of a micro-batch. Out: (total, weight, gradients of total, buffers weighted by the share),
all of them summands over ranks. Hooks see the gradient of the mean over the share, as in a loop written by hand.
Random numbers come from torch's generator, seeded by (seed, step, micro-batch, first sample).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import JobError, PlaitError
from plait.graph.capture.watch import Watch
from plait.job.copies import copy_of
from plait.job.data.loader import Share
from plait.job.dtypes import default_dtype, leaf_dtype
from plait.job.job import Job
from plait.job.origin import fix_of, told
from plait.program.instructions import Opaque
from plait.run.hold.state import ModelState
from plait.torch_private import pytree

_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)


def run_eagerly(state: ModelState, share: Share, model: Opaque, step: int, micro_batch: int) -> list[Tensor]:
    """[total, weight, *gradients, *buffers] of one share; an empty share contributes zeros."""
    tensors = [state.parameters[name] for name in model.parameters]
    zero = torch.zeros((), dtype=state.dtype, device=state.device)
    if len(share.ids) == 0:
        gradients: list[Any] = [torch.zeros_like(tensor) for tensor in tensors]
        return [zero, zero.clone(), *gradients, *_buffers(state, model.buffers, share)]
    batch, job = pytree.tree_map_only(Tensor, state.place, share.batch), state.part(step)
    with (
        torch.random.fork_rng(devices=[state.device] if state.device.type == "cuda" else []),
        torch.enable_grad(),
        _trained_alone(state, model.parameters),
    ):
        torch.manual_seed(seed_of(state.job, step, micro_batch, share.offset))
        frozen = [(name, p) for name, p in state.parameters.items() if not p.requires_grad]
        with state.job.autocast(state.device.type), default_dtype(state.asked):
            result = job.objective_of(state.model, batch)
            total, weight = total_and_weight(job, batch, len(share.ids), result)
        _refuse_late_training(frozen)
        mean = result if isinstance(result, Tensor) else total / weight
        found = _backward(mean, tensors) if float(weight) > 0 else [None] * len(tensors)
    gradients = [
        torch.zeros_like(t) if g is None else g * weight for t, g in zip(tensors, found, strict=True)
    ]
    return [total.detach(), weight.detach(), *gradients, *_buffers(state, model.buffers, share)]


@contextlib.contextmanager
def _trained_alone(state: ModelState, names: tuple[str, ...]) -> Iterator[None]:
    """What another objective trains needs no gradient now."""
    others = [p for name, p in state.named if p.requires_grad and name not in names]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def seed_of(job: Job, step: int, micro_batch: int, offset: int) -> int:
    """Of torch's generator, for a share that begins at sample `offset` of a micro-batch."""
    return ((job.seed * 1_000_003 + step) * 1_000_003 + micro_batch * 65_537 + offset) % (1 << 63)


def _backward(loss: Tensor, tensors: list[nn.Parameter]) -> list[Tensor | None]:
    """The gradients as `loss.backward()` leaves them, whatever hooks of the user's do to them on the way."""
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        return [tensor.grad for tensor in tensors]
    finally:
        for tensor, gradient in zip(tensors, before, strict=True):
            tensor.grad = gradient


def _refuse_late_training(frozen: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise JobError(
                f"the forward set requires_grad of {name}, which was frozen when the model was built: the optimizer "
                "does not know it.",
                fix="build it with requires_grad=True, "
                "and let the job say until when it is frozen: freeze=[Freeze(parameters=..., until=...)].",
            )


def try_eagerly(job: Job, batch: Any) -> bool:
    """One forward pass on a few samples, here and now: what cannot work at all is told before any process starts.

    Returns whether float64 data must be given as float32 for it.
    """
    try:
        _try(job, batch, narrow=False)
        return False
    except PlaitError:
        raise
    except Exception as error:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        if any(leaf.dtype == torch.float64 for leaf in leaves):
            with contextlib.suppress(Exception):
                _try(job, batch, narrow=True)
                return True
        raise JobError(
            f"the model or its loss failed on the first samples{told(error)}",
            fix=fix_of(error, "mend that line, or the shapes of what it is given."),
        ) from error


def _try(job: Job, batch: Any, narrow: bool) -> None:
    model = job.build_model()
    model = copy_of(model) if model is job.model else model
    watch = Watch({"loss": job.loss, "objective": job.objective})

    def given(leaf: Tensor) -> Tensor:
        return leaf.to(leaf_dtype(leaf.dtype, torch.float32, narrow), copy=True)

    try:
        with torch.enable_grad(), job.autocast("cpu"):
            job.objective_of(model.train(), pytree.tree_map_only(Tensor, given, batch))
    finally:
        watch.restore()


def _buffers(state: ModelState, names: tuple[str, ...], share: Share) -> list[Tensor]:
    """Summands of the ranks' buffers: their mean by samples; counters are those of the first rank that has samples."""
    fraction = len(share.ids) / sum(share.sizes)
    leads = 1.0 if len(share.ids) > 0 and share.offset == 0 else 0.0
    buffers = [state.buffers[name].detach() for name in names]
    return [
        buffer * fraction if buffer.is_floating_point() else buffer.double() * leads for buffer in buffers
    ]


def total_and_weight(
    job: Job, batch: Any, num_samples: int, result: Tensor | tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The objective's result as (total, weight): known loss modules by their own weights, others by their samples."""
    if not isinstance(result, Tensor):
        total, weight = result
        return total, weight.to(total.dtype)
    weight = result.new_tensor(float(num_samples))
    loss = job.loss
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.reduction == "mean":
        target = batch[-1]
        if not target.is_floating_point():
            keep = target != loss.ignore_index
            weight = keep.sum().to(result.dtype)
            if loss.weight is not None:
                weight = (loss.weight.to(result)[target * keep] * keep).sum()
    return torch.where(weight > 0, result * weight, torch.zeros_like(result)), weight


def counts_samples(job: Job) -> bool:
    """Whether the eager loss is read as a mean over samples for want of a better reading."""
    return job.loss is None or not isinstance(job.loss, (nn.CrossEntropyLoss, nn.NLLLoss, *_ELEMENTWISE))
