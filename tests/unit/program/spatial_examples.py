"""Calls of ops on images and sequences that can be cut by rows, and the dims that must be among the candidates."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
ours = torch.ops.plait
_generator = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class SpatialExample:
    """One call."""

    target: Any
    args: tuple[Any, ...]
    dims: tuple[int, ...]
    """The dims of the first tensor that an axis of 2 must be able to cut."""
    not_dims: tuple[int, ...] = ()
    """Dims that no strategy may cut, because windows do not line up."""


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def e(target: Any, *args: Any, dims: tuple[int, ...], not_dims: tuple[int, ...] = ()) -> SpatialExample:
    return SpatialExample(target, args, dims, not_dims)


def _convolution(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    transposed: bool = False,
    extra: int = 0,
    groups: int = 1,
    bias: bool = True,
    dims: tuple[int, ...] = (2, 3),
    not_dims: tuple[int, ...] = (),
    mask: tuple[bool, bool] = (True, True),
) -> list[SpatialExample]:
    """A convolution and its backward."""
    n = len(shape) - 2
    channels = weight[1] * groups if transposed else weight[0]
    image, kernel = x(*shape), x(*weight)
    options = [[stride] * n, [padding] * n, [dilation] * n, transposed, [extra] * n, groups]
    out = aten.convolution.default(image, kernel, None, *options)
    shift = x(channels) if bias else None
    backward = (x(*out.shape), image, kernel, [channels] if bias else None, *options, [*mask, bias])
    return [
        e(aten.convolution.default, image, kernel, shift, *options, dims=dims, not_dims=not_dims),
        e(aten.convolution_backward.default, *backward, dims=dims, not_dims=not_dims),
    ]


def _pool(name: str, shape: tuple[int, ...], *options: Any, **dims: Any) -> list[SpatialExample]:
    """A pool and its backward; `options` are all those of the backward."""
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    image = x(*shape)
    out = forward(image, *options)
    first, *indices = out if isinstance(out, tuple) else (out,)
    return [
        e(forward, image, *options, **dims),
        e(backward, x(*first.shape), image, *options, *indices, **dims),
    ]


_image = x(2, 6, 12, 6)
_gain, _shift = x(6), x(6)
_q, _k, _v = x(2, 4, 12, 4), x(2, 4, 12, 4), x(2, 4, 12, 4)
_look = torch.rand(2, 1, 12, 12, generator=_generator) > 0.3
_group = aten.native_group_norm.default(_image, _gain, _shift, 2, 6, 72, 3, 1e-5)
_batch = ours.batch_norm(_image, _gain, _shift, x(6), x(6).abs(), 0.1, 1e-5)


def _attention(mask: Tensor | None, causal: bool) -> list[SpatialExample]:
    forward = ours.attention(_q, _k, _v, mask, causal, 0.5)
    return [
        e(ours.attention.default, _q, _k, _v, mask, causal, 0.5, dims=(2,)),
        e(
            ours.attention_backward.default,
            x(2, 4, 12, 4),
            _q,
            _k,
            _v,
            *forward,
            mask,
            causal,
            0.5,
            dims=(2,),
        ),
    ]


SPATIAL_EXAMPLES: list[SpatialExample] = [
    *_convolution((2, 4, 12, 6), (6, 4, 3, 3), padding=1),
    *_convolution((2, 4, 12, 6), (6, 4, 3, 3), padding=1, bias=False, mask=(True, False)),
    *_convolution((2, 4, 12, 6), (6, 4, 3, 3), padding=1, mask=(False, True)),
    *_convolution((2, 4, 12, 12), (6, 4, 3, 3), padding=1, stride=2),
    *_convolution((2, 4, 12, 12), (6, 4, 1, 1), stride=2),
    *_convolution((2, 4, 12, 12), (6, 2, 3, 3), padding=2, dilation=2, groups=2),
    *_convolution((2, 4, 12, 12), (6, 4, 3, 3), padding=3, dilation=3),
    *_convolution((2, 4, 24, 24), (6, 4, 7, 7), padding=3, stride=2),
    *_convolution((2, 4, 12, 12), (6, 4, 2, 2), stride=2),
    *_convolution((2, 4, 12, 12), (6, 4, 3, 3), dims=(), not_dims=(2, 3)),
    *_convolution((2, 4, 12, 12), (6, 4, 3, 3), padding=2, dims=(), not_dims=(2, 3)),
    *_convolution((2, 4, 4, 12), (6, 4, 7, 7), padding=3, dims=(3,), not_dims=(2,)),
    *_convolution((2, 4, 12), (6, 4, 5), padding=2, dims=(2,)),
    *_convolution((2, 4, 6, 6, 12), (3, 4, 3, 3, 3), padding=1, dims=(2, 3, 4)),
    *_convolution((2, 4, 6, 12), (4, 3, 2, 2), stride=2, transposed=True),
    *_convolution((2, 4, 6, 12), (4, 3, 4, 4), stride=2, padding=1, transposed=True),
    *_convolution((2, 4, 6, 12), (4, 3, 3, 3), stride=2, padding=1, extra=1, transposed=True),
    *_convolution((2, 4, 6, 12), (4, 3, 3, 3), padding=1, transposed=True, groups=2, bias=False),
    *_pool("max_pool2d_with_indices", (2, 3, 12, 12), [2, 2], [2, 2], [0, 0], [1, 1], False, dims=(2, 3)),
    *_pool("max_pool2d_with_indices", (2, 3, 12, 12), [3, 3], [2, 2], [1, 1], [1, 1], False, dims=(2, 3)),
    *_pool("max_pool2d_with_indices", (3, 12, 12), [3, 3], [1, 1], [1, 1], [1, 1], True, dims=(1, 2)),
    *_pool("max_pool3d_with_indices", (2, 3, 6, 6, 6), [3] * 3, [1] * 3, [1] * 3, [1] * 3, False, dims=(2, 3, 4)),
    *_pool("avg_pool2d", (2, 3, 12, 12), [2, 2], [2, 2], [0, 0], False, False, None, dims=(2, 3)),
    *_pool("avg_pool2d", (2, 3, 12, 12), [3, 3], [2, 2], [1, 1], False, True, None, dims=(2, 3)),
    *_pool("avg_pool2d", (2, 3, 12, 12), [3, 3], [1, 1], [1, 1], False, False, None, dims=(), not_dims=(2, 3)),
    *_pool("avg_pool2d", (2, 3, 12, 12), [3, 3], [1, 1], [1, 1], False, False, 5, dims=(2, 3)),
    *_pool("avg_pool3d", (2, 3, 6, 6, 6), [2] * 3, [2] * 3, [0] * 3, False, True, None, dims=(), not_dims=(2,)),
    e(aten.avg_pool2d.default, _image, [2, 2], dims=(2,), not_dims=(3,)),
    e(aten._adaptive_avg_pool2d.default, _image, [6, 1], dims=(2, 3)),
    e(aten._adaptive_avg_pool2d.default, _image, [5, 6], dims=(3,), not_dims=(2,)),
    e(aten._adaptive_avg_pool2d_backward.default, x(2, 6, 6, 6), _image, dims=(2, 3)),
    e(aten._adaptive_avg_pool2d_backward.default, x(2, 6, 1, 1), x(2, 6, 12, 6), dims=()),
    e(aten._adaptive_avg_pool3d.default, x(2, 3, 12, 6, 6), [6, 6, 1], dims=(2, 3, 4)),
    e(aten._adaptive_avg_pool3d_backward.default, x(2, 3, 6, 6, 6), x(2, 3, 12, 6, 6), dims=(2, 3, 4)),
    e(aten.upsample_nearest1d.default, x(2, 3, 6), [12], dims=(2,)),
    e(aten.upsample_nearest2d.default, _image, [24, 9], dims=(2,), not_dims=(3,)),
    e(aten.upsample_nearest2d.vec, _image, None, [2.0, 3.0], dims=(2, 3)),
    e(aten.upsample_nearest2d.vec, _image, [24, 18], None, dims=(2, 3)),
    e(aten.upsample_nearest3d.default, x(2, 3, 6, 6, 6), [12, 12, 6], dims=(2, 3, 4)),
    e(aten.upsample_nearest1d_backward.default, x(2, 3, 12), [12], [2, 3, 6], dims=(2,)),
    e(aten.upsample_nearest2d_backward.default, x(2, 3, 12, 12), [12, 12], [2, 3, 6, 6], 2.0, 2.0, dims=(2, 3)),
    e(aten.upsample_nearest3d_backward.default, x(2, 3, 12, 12, 6), [12, 12, 6], [2, 3, 6, 6, 6], dims=(2, 3, 4)),
    e(ours.batch_norm.default, _image, _gain, _shift, x(6), x(6).abs(), 0.1, 1e-5, dims=(0, 1, 2, 3)),
    e(ours.batch_norm.default, x(12, 6), None, None, x(6), x(6).abs(), 0.1, 1e-5, dims=(0, 1)),
    e(ours.batch_norm_backward.default, x(2, 6, 12, 6), _image, _gain, *_batch[1:3], 1e-5, dims=(0, 1, 2, 3)),
    e(aten.native_group_norm.default, _image, _gain, _shift, 2, 6, 72, 3, 1e-5, dims=(0, 2, 3)),
    e(aten.native_group_norm.default, _image, None, None, 2, 6, 72, 6, 1e-5, dims=(0, 1, 2, 3)),
    e(
        aten.native_group_norm_backward.default, x(2, 6, 12, 6), _image, *_group[1:], _gain, 2, 6, 72, 3,
        [True, True, True], dims=(0, 2, 3),
    ),
    e(
        aten.native_group_norm_backward.default, x(2, 6, 12, 6), _image, *_group[1:], None, 2, 6, 72, 3,
        [True, False, False], dims=(0, 2, 3),
    ),
    *_attention(None, False), *_attention(None, True), *_attention(_look, False), *_attention(_look[:, :, :1], False),
]  # fmt: skip
