"""Torch functions that capture takes as ops of our own: batch norm, grouped products; others: `recurrent`, `attention`.

In: calls that the user's model makes while it is traced. Out: calls of `plait::` ops, or of plain torch functions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.errors import CaptureError, JobError
from plait.graph.capture.branches import Decisions
from plait.graph.capture.endings import NeedsValuesError
from plait.graph.capture.islands import Islands
from plait.graph.capture.plain_forms import PLAIN_FORMS
from plait.graph.capture.recurrent import is_recurrent_op, recurrent
from plait.graph.capture.refusal import refuse_other_devices
from plait.graph.ops.attention import AttentionCapture, plain_attention
from plait.graph.ops.batch_norm import batch_norm
from plait.graph.ops.grouped import grouped_product, suits_grouped_op
from plait.graph.rewrite.marks import Marks
from plait.torch_private.autograd import is_transformed
from plait.torch_private.fake import DataDependentOutputException
from plait.torch_private.ops import grouped_mm
from plait.torch_private.tracing import tracer


class StaleTensorError(Exception):
    """The forward reads a tensor that an earlier forward left behind."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class NeedsPlainOpsError(Exception):
    """The objective differentiates: capture again without ops of ours, which can be differentiated only once."""


class FunctionCapture(AttentionCapture):
    """Replace functions that depend on the device or on the whole batch by ops that plans can partition."""

    def __init__(
        self, marks: Marks, plain: bool, stale: Mapping[int, str], decisions: Decisions, islands: Islands
    ) -> None:
        super().__init__()
        self._decisions, self._islands = decisions, islands
        self.numbers: dict[int, Tensor] = {}
        """What `item()` gave: tensors in the place of Python's numbers."""
        self._stale = stale
        self._marks = marks
        self._plain = plain
        self._uniform: dict[int, Tensor] = {}
        """Single numbers that were drawn from [0, 1)."""
        self.live: dict[int, Tensor] = {}
        """The tensors that functions were given and gave, with their history."""
        self.hooked_scalar = False
        """Whether a hook was put on a scalar, which a loss is made of."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._marks.source_line()
        refuse_other_devices(func, args, kwargs or {})
        if func is torch.Tensor.register_hook and args[0].numel() == 1:
            self.hooked_scalar = True
        if self._stale:
            for leaf in _tensors(args):
                if id(leaf) in self._stale:
                    raise StaleTensorError(self._stale[id(leaf)])
        known = _known(func, args) if args and id(args[0]) in self._uniform else None
        try:
            result: Any = (
                self._call(func, types, args, dict(kwargs or {})) if known is None else torch.tensor(known)
            )
        except DataDependentOutputException as error:
            self._islands.stack, self._islands.stopped = self._marks.path, error
            if func not in (Tensor.__bool__, Tensor.item):
                raise
            result = self._undecided(func, args[0])
        except (NeedsPlainOpsError, NeedsValuesError):
            raise
        except Exception as error:
            self._islands.stack, self._islands.stopped = self._marks.path, error
            raise
        if func is torch.rand and result.numel() == 1:
            self._uniform[id(result)] = result
        for leaf in (*_tensors(args), *_tensors(result)):
            self.live[id(leaf)] = leaf
        return result

    def _holds(self, flag: Tensor) -> bool:
        self._islands.refuse_questions(self._marks.path)
        return self._decisions.decide(flag, self._marks.source)

    def _undecided(self, func: Callable[..., Any], asked: Tensor) -> Any:
        """The outcome of a comparison, as this trace assumes it; a number that Python reads stays a tensor."""
        last = next(iter(reversed(tracer().graph.nodes)))
        if last.target is torch.ops.aten._local_scalar_dense.default:  # torch has noted what it could not do
            tracer().graph.erase_node(last)
        number = asked.detach().reshape(())
        if func is Tensor.__bool__:
            return self._holds(number != 0)
        self.numbers[id(number)] = number
        return number

    def _call(self, func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in (torch.equal, Tensor.equal):
            mine, other = args
            return mine.shape == other.shape and self._holds((mine == other).all())
        if func in (torch.allclose, Tensor.allclose):
            return self._holds(torch.isclose(*args, **kwargs).all())
        if func == _SET_DATA:
            return _set_data(*args)
        if func in PLAIN_FORMS:
            return PLAIN_FORMS[func](func, *args, **kwargs)
        if func is torch.autograd.grad and not self._plain:
            raise NeedsPlainOpsError
        if func is F.instance_norm:
            return _instance_norm(func, *args, **kwargs)
        if func is F.batch_norm:
            return _batch_norm(self._plain or is_transformed(), *args, **kwargs)
        if func is grouped_mm and suits_grouped_op(*args, **kwargs):
            return grouped_product(args[0], args[1], kwargs["offs"] if "offs" in kwargs else args[2])
        if self._plain or is_transformed():
            return plain_attention(func, args, kwargs)
        if is_recurrent_op(func, args):
            return recurrent(func, args)
        return super().__torch_function__(func, types, args, kwargs)


_BOUNDS: Mapping[Any, tuple[Callable[[float], bool], Callable[[float], bool]]] = {
    Tensor.lt: (lambda p: p <= 0, lambda p: p >= 1),
    Tensor.le: (lambda p: p < 0, lambda p: p >= 1),
    Tensor.gt: (lambda p: p >= 1, lambda p: p < 0),
    Tensor.ge: (lambda p: p >= 1, lambda p: p <= 0),
}
"""Comparisons of a number in [0, 1) with another: for which others they are never true, and for which always."""


def _known(func: Callable[..., Any], args: Sequence[Any]) -> bool | None:
    """The outcome of a comparison that no draw can change: `torch.rand([]) < self.layerdrop` where that is 0."""
    never, always = _BOUNDS.get(func, (None, None))
    if never is None or always is None or len(args) != 2 or not isinstance(args[1], (int, float)):
        return None
    return False if never(args[1]) else True if always(args[1]) else None


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """`parameter.data = value`: a write, whoever reads it later."""
    if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
        raise CaptureError(
            f"the forward gives a tensor of {list(tensor.shape)} other data, of {list(value.shape)}.",
            fix="write values of the same shape and dtype to have it captured; plans single and ddp run it eagerly.",
        )
    with torch.no_grad():
        tensor.copy_(value)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, which are at most a list deep."""
    entries = values if isinstance(values, tuple | list) else (values,)
    found = []
    for entry in entries:
        if isinstance(entry, Tensor):
            found.append(entry)
        elif isinstance(entry, tuple | list):
            found += [inner for inner in entry if isinstance(inner, Tensor)]
    return found


def _batch_norm(
    plain: bool,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        channels = x.shape[1]
        if x.numel() == channels:
            raise JobError(
                f"batch norm needs more than one value per channel to train; a micro-batch gives it {tuple(x.shape)}.",
                fix="choose batch and accumulate so that no micro-batch, the last of an epoch too, has one sample.",
            )
        dtype = weight.dtype if weight is not None else x.dtype
        if plain:
            output, mean, var = _plain_batch_norm(x, weight, bias, eps)
            if running_mean is not None and running_var is not None:
                with torch.no_grad():
                    running_mean.copy_(running_mean * (1 - momentum) + mean.to(running_mean.dtype) * momentum)
                    running_var.copy_(running_var * (1 - momentum) + var.to(running_var.dtype) * momentum)
            return output
        mean = running_mean if running_mean is not None else x.new_zeros(channels, dtype=dtype)
        var = running_var if running_var is not None else x.new_ones(channels, dtype=dtype)
        output, _, _, new_mean, new_var = batch_norm(x, weight, bias, mean, var, momentum, eps)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.copy_(new_mean)
                running_var.copy_(new_var)
        return output  # type: ignore[no-any-return]
    assert running_mean is not None and running_var is not None
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale
    if bias is not None:
        shift = shift + bias
    return x * scale.view(shape) + shift.view(shape)


def _plain_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalized batch by ops that can be differentiated any number of times, its mean and unbiased variance."""
    dims, shape = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
    mean = x.mean(dims)
    centered = x - mean.view(shape)
    var = centered.square().mean(dims)
    output = centered * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        output = output * weight.view(shape)
    if bias is not None:
        output = output + bias.view(shape)
    count = x.numel() // x.shape[1]
    return output, mean.detach(), var.detach() * (count / (count - 1))


def _instance_norm(
    func: Callable[..., Tensor],
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each sample by its own statistics; running ones follow their means, which torch writes to views of copies."""
    if use_input_stats and running_mean is not None and running_var is not None:
        with torch.no_grad():
            dims = tuple(range(2, x.ndim))
            var, mean = torch.var_mean(x, dims)
            running_mean.copy_(running_mean * (1 - momentum) + mean.mean(0).to(running_mean.dtype) * momentum)
            running_var.copy_(running_var * (1 - momentum) + var.mean(0).to(running_var.dtype) * momentum)
        running_mean = running_var = None
    return func(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
