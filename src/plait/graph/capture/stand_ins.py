"""What parts of torch do while a model is traced, where their own way cannot be traced.

Checkpointing calls its function plainly (what is computed again is noted, and a plan's decision); compiled parts run as
they were written; batch norm with a cumulative average reads its counter as a tensor; `torch.cond`, `while_loop` and
`scan` are the plain Python that they stand for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from plait.torch_private import pytree
from plait.torch_private.modules import BatchNorm, check_dims, replaced


@contextmanager
def stand_ins(
    on_checkpoint: Callable[[Any], AbstractContextManager[None]] = lambda function: nullcontext(),
) -> Iterator[None]:
    """While active, the parts of torch named above do what can be traced; what is wrapped runs in `on_checkpoint`."""

    class Noted:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with on_checkpoint(function):
                return _Reentrant.apply(function, preserve, *args)

    def plain(function: Callable[..., Any], *_: Any, **__: Any) -> Iterator[None]:
        with on_checkpoint(function):
            yield

    with replaced(_batch_norm, Noted, plain, (_cond, _while_loop, _scan), _encoder):
        yield


def _cond(
    _op: Any, pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(
    _op: Any,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: Sequence[Any],
    additional_inputs: Sequence[Any],
    **_: Any,
) -> Any:
    while cond_fn(*carried_inputs, *additional_inputs):
        carried_inputs = body_fn(*carried_inputs, *additional_inputs)
    return tuple(carried_inputs)


def _scan(
    _op: Any,
    combine_fn: Callable[..., Any],
    init: Sequence[Any],
    xs: Sequence[Tensor],
    additional_inputs: Sequence[Any],
) -> Any:
    carried, rows = init, []
    for parts in zip(*(x.unbind(0) for x in xs), strict=True):
        found = combine_fn(*carried, *parts, *additional_inputs)
        carried = found[: len(init)]
        rows.append(found[len(init) :])
    columns = zip(*rows, strict=True)
    return (*carried, *(None if column[0] is None else torch.stack(column) for column in columns))


class _Reentrant:
    """Reentrant checkpointing gives no gradient to what is inside where none of its inputs has one."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        wanted = any(leaf.requires_grad for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor))
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
            return function(*args)


_encode = nn.TransformerEncoder.forward


def _encoder(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """Without gradients and in eval mode, torch leaves padding out and puts zeros in its place before the last norm."""
    given, first = (src, mask, src_key_padding_mask, is_causal), encoder.layers[0]
    tensors = [src, *first.parameters()]
    leaves_out = torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)
    moves = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if src_key_padding_mask is None or mask is not None or src.dim() != 3 or first.training:
        leaves_out = False
    if not leaves_out or moves or torch.is_autocast_enabled():
        return _encode(encoder, *given)
    assert src_key_padding_mask is not None
    padded = src_key_padding_mask
    padded = padded if padded.dtype == torch.bool else padded != 0
    if getattr(encoder, "mask_check", True):  # it does so where all padding comes last
        padded = padded & (padded[:, 1:] >= padded[:, :-1]).all()
    norm, encoder.norm = encoder.norm, None
    try:
        output = _encode(encoder, *given).masked_fill(padded.unsqueeze(-1), 0.0)
    finally:
        encoder.norm = norm
    return output if norm is None else norm(output)


_forward = BatchNorm.forward


def _batch_norm(module: BatchNorm, x: Tensor) -> Tensor:
    cumulative = module.momentum is None and module.training and module.track_running_stats
    if not cumulative or module.running_mean is None or module.running_var is None:
        return _forward(module, x)
    check_dims(module, x)
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(module.running_mean), torch.ones_like(module.running_var)
    output = torch.nn.functional.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        part = 1.0 / module.num_batches_tracked.to(mean.dtype)
        module.running_mean.copy_(module.running_mean * (1 - part) + mean * part)
        module.running_var.copy_(module.running_var * (1 - part) + var * part)
    return output
