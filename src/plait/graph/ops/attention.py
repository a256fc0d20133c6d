"""Attention as one op forward and one backward, on any device.

In: calls of `F.scaled_dot_product_attention` while a model is captured. Out: `plait::attention` and
`plait::attention_backward` nodes, which are executed by the fastest kernel of the device that the graph runs on (the
graph is captured on CPU fakes whatever that device is). It never draws random numbers and never computes the gradient
of a mask: attention with dropout, or with a learned bias, is captured as matmul, softmax and dropout instead.

    q [B, H, T, D], k [B, G, S, D], v [B, G, S, E]: H / G heads of queries share a key; mask bool (True: look) or float
    (added), each of its four dims full or 1; out [B, H, T, E], lse [B, H, T] = logsumexp of the scaled and masked
    scores (float32, or float64 like q). The gradients of k and v have H heads.

Causal means that query t sees keys 0..t, also where T != S. A query that sees no key gives 0. The outputs and gradients
lie in memory as [B, T, H, D] on every device, so that the graph's views hold everywhere.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from plait.graph.ops.attention_kernels import attention, attention_backward, wide

__all__ = ["IMPLEMENTATIONS", "AttentionCapture", "attention", "attention_backward", "plain_attention"]


class AttentionCapture(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` becomes `plait::attention`, or plain ops where that cannot be."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _capture(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            # torch runs it with this mode switched off, and the attention inside would not be seen.
            with _attention_inside_functional(_capture):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def plain_attention(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with attention as ops of torch's that can be differentiated any number of times."""
    if func is F.scaled_dot_product_attention:
        return partial(_capture, plain=True)(*args, **kwargs)
    if func is F.multi_head_attention_forward:
        with _attention_inside_functional(partial(_capture, plain=True)):
            return func(*args, **kwargs)
    return func(*args, **kwargs)


@contextmanager
def _attention_inside_functional(replacement: Callable[..., Tensor]) -> Iterator[None]:
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = replacement
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _capture(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    plain: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` in ops that plait can place."""
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: set attn_mask or is_causal=True, not both.")
    q, k, v = (_autocast(x) for x in (query, key, value))
    mask = None if attn_mask is None else _autocast(attn_mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    learned = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    same = q.dtype == k.dtype == v.dtype and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if plain or dropout_p > 0.0 or learned or not same or q.dim() not in (3, 4):
        return _plain_ops(q, k, v, mask, dropout_p, is_causal, scale)
    if mask is not None:
        # The missing dims of a mask are the first of q's; a 3-D q gets its heads at dim 1.
        mask = mask[(None,) * (q.dim() - mask.dim())]
        mask = mask.unsqueeze(1) if q.dim() == 3 else mask
    if q.dim() == 3:
        heads = (x.unsqueeze(1) for x in (q, k, v))
        out: Tensor = torch.ops.plait.attention(*heads, mask, is_causal, scale)[0].squeeze(1)
    else:
        out = torch.ops.plait.attention(q, k, v, mask, is_causal, scale)[0]
    return out


def _autocast(x: Tensor) -> Tensor:
    """What autocast does to the arguments of attention, which it cannot see behind our op."""
    if not torch.is_autocast_enabled(x.device.type):
        return x
    narrow = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if narrow else x


def _plain_ops(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    scores = (q * math.sqrt(scale)) @ (k.transpose(-2, -1) * math.sqrt(scale))
    blind: Tensor | None = None
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if mask is not None:
        # A query that sees no key: softmax would be 0/0, so its scores are kept finite and its weights set to 0.
        blind = (
            ~mask.any(-1, keepdim=True)
            if mask.dtype == torch.bool
            else (mask == -math.inf).all(-1, keepdim=True)
        )
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~(mask | blind), -math.inf)
        else:
            scores = scores + mask.masked_fill(blind, 0.0).to(scores.dtype)
    weights = torch.softmax(scores, -1).to(v.dtype)
    if blind is not None:
        weights = weights.masked_fill(blind, 0.0)
    return F.dropout(weights, dropout_p) @ v if dropout_p > 0.0 else weights @ v


def _fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty((batch, length, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, length), dtype=wide(q.dtype))


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    heads = q.shape[1]
    return tuple(x.new_empty((x.shape[0], x.shape[2], heads, x.shape[3])).transpose(1, 2) for x in (q, k, v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, mask)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    saved = ctx.saved_tensors
    return (*torch.ops.plait.attention_backward(grad, *saved, ctx.causal, ctx.scale), None, None, None)


def _register() -> Mapping[Any, Callable[..., Any]]:
    if not hasattr(torch.ops.plait, "attention"):
        options = "Tensor? mask, bool causal, float scale"
        forward = f"(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor out, Tensor lse)"
        inputs = "Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
        backward = f"({inputs}, {options}) -> (Tensor, Tensor, Tensor)"
        for name, schema, function, fake in (
            ("plait::attention", forward, attention, _fake),
            ("plait::attention_backward", backward, attention_backward, _fake_backward),
        ):
            torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.impl(name, ("cpu", "cuda"), function)
            torch.library.register_fake(name, fake)
        torch.library.register_autograd("plait::attention", _backward, setup_context=_save_for_backward)
    ops = torch.ops.plait
    return MappingProxyType(
        {ops.attention.default: attention, ops.attention_backward.default: attention_backward}
    )


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = _register()
"""Each op's function on real tensors, for calls that bypass the dispatcher."""
