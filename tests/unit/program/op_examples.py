"""One line per op that has a placement rule: a call on small tensors whose dims can be cut.

A dim of extent 6 is cut in shares of 2, 1 and 3 units, or 4, 0 and 2; one of extent 12 also in pieces of each of two parts.
"""
# ruff: noqa: E501

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.unit.program.one_op import Zeros
from torch import Tensor

from plait.graph.ops.random import random_key

aten = torch.ops.aten
ours = torch.ops.plait
_numbers = torch.Generator().manual_seed(7)


@dataclass(frozen=True)
class Example:
    """One call of an op."""

    target: Any
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    key: Tensor | None = None
    """The key of random numbers, for ops that draw them."""
    values: bool = True
    """False where only the shape is defined."""
    tolerance: float = 1e-10
    absent: tuple[int, ...] = ()
    """Outputs whose value is not defined."""

    def __str__(self) -> str:
        return str(self.target)


def x(*shape: int) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=_numbers, dtype=torch.float64)


def u(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9."""
    return torch.rand(shape, generator=_numbers, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape, generator=_numbers)


def m(*shape: int) -> Tensor:
    """True or False."""
    return torch.rand(shape, generator=_numbers) < 0.5


def e(target: Any, *args: Any, **kwargs: Any) -> Example:
    """An example."""
    return Example(target, args, kwargs)


def shape_only(target: Any, *args: Any, **kwargs: Any) -> Example:
    """An example of an op that makes memory and no values."""
    return Example(target, args, kwargs, values=False)


def drawn(target: Any, *args: Any) -> Example:
    """An example of an op that draws numbers: (shape, dtype, ...)."""
    key = random_key(seed=3, step=5, micro_batch=1)
    return Example(target, (key, 4, *args), key=key)


_F64: dict[str, Any] = {"dtype": torch.float64}
_image, _volume, _line = x(6, 6, 4, 4), x(6, 6, 4, 4, 4), x(6, 6, 8)
_q, _k, _v = x(6, 6, 3, 4), x(6, 6, 5, 4), x(6, 6, 5, 4)
_look = torch.ones(6, 1, 3, 5, dtype=torch.bool).tril()
_added = x(1, 6, 3, 5)
_pool2, _where2 = aten.max_pool2d_with_indices.default(_image, [2, 2], [2, 2])
_pool3, _where3 = aten.max_pool3d_with_indices.default(_volume, [2, 2, 2], [2, 2, 2])
_adaptive, _adaptive_where = aten.adaptive_max_pool2d.default(_image, [2, 2])
_rows, _gain, _shift = x(12, 3, 5), x(5), x(5)
_, _row_mean, _row_rstd = aten.native_layer_norm.default(_rows, [5], _gain, _shift, 1e-5)
_long, _long_gain = x(3, 12), u(12)
_, _long_mean, _long_rstd = aten.native_layer_norm.default(_long, [12], _long_gain, None, 1e-5)
_channel_gain, _channel_shift = x(6), x(6)
_group_y, _group_mean, _group_rstd = aten.native_group_norm.default(
    _image, _channel_gain, _channel_shift, 6, 6, 16, 3, 1e-5
)
_batch_y, _batch_mean, _batch_invstd, _, _ = ours.batch_norm(
    _image, _channel_gain, _channel_shift, x(6), u(6), 0.1, 1e-5
)
_direction, _length = x(6, 4), u(6, 1)
_, _direction_norm = aten._weight_norm_interface.default(_direction, _length, 0)
_folded = x(1, 12, 4, 4)
_, _folded_mean, _folded_rstd = aten.native_batch_norm.default(
    _folded, x(12), x(12), None, None, True, 0.1, 1e-5
)
_logits, _labels, _class_weight = x(12, 5).log_softmax(1), i(5, 12), u(5)
_labels[1], _labels[7] = -100, -100
_words, _word_labels, _word_weight = x(7, 12).log_softmax(1), i(12, 7), u(12)
_word_labels[2], _word_labels[5] = -100, -100
_weight_of_words = _word_weight[_word_labels.clamp(min=0)][_word_labels != -100].sum()
_pixels, _pixel_labels = x(2, 6, 6, 3).log_softmax(1), i(6, 2, 6, 3)
_maps, _map_labels = x(6, 5, 3, 3).log_softmax(1), i(5, 6, 3, 3)
_weight_of_all = _class_weight[_labels.clamp(min=0)][_labels != -100].sum()

POINTWISE = (
    e(aten.add.Tensor, x(12, 6), x(12, 6)), e(aten.add.Tensor, x(12, 6), x(6), alpha=2.0), e(aten.add.Tensor, x(12, 6), 1.5),
    e(aten.add.Tensor, x(1, 6), x(12, 1)), e(aten.add.Tensor, x(6), x(12, 6)), e(aten.sub.Tensor, x(12, 6), x(12, 6)),
    e(aten.sub.Tensor, x(6, 6), x()), e(aten.rsub.Scalar, x(12, 6), 2.0), e(aten.mul.Tensor, x(12, 6), x(12, 6)),
    e(aten.mul.Tensor, x(12, 6), 3.0), e(aten.mul.Tensor, x(), x(12, 6)), e(aten.mul.Scalar, x(12, 6), 3.0),
    e(aten.div.Tensor, x(12, 6), u(6)), e(aten.div.Tensor, x(12, 6), 4.0), e(aten.div.Scalar, x(12, 6), 3.0),
    e(aten.div.Tensor_mode, x(12, 6), u(6), rounding_mode="floor"), e(aten.neg.default, x(12, 6)), e(aten.reciprocal.default, u(12, 6)),
    e(aten.relu.default, x(12, 6)), e(aten.gelu.default, x(12, 6)), e(aten.gelu_backward.default, x(12, 6), x(12, 6), approximate="tanh"),
    e(aten.threshold_backward.default, x(12, 6), x(12, 6), 0), e(aten.tanh.default, x(12, 6)), e(aten.tanh_backward.default, x(12, 6), x(12, 6)),
    e(aten.sigmoid.default, x(12, 6)), e(aten.sigmoid_backward.default, x(12, 6), x(12, 6)), e(aten.silu.default, x(12, 6)),
    e(aten.silu_backward.default, x(12, 6), x(12, 6)), e(aten.elu.default, x(12, 6)), e(aten.leaky_relu.default, x(12, 6)),
    e(aten._conj_physical.default, x(12, 6)),
    e(aten.leaky_relu_backward.default, x(12, 6), x(12, 6), 0.01, False), e(aten.hardtanh_backward.default, x(12, 6), x(12, 6), -1.0, 1.0),
    *(e(op.default, x(12, 6), x(12, 6)) for op in (aten.mish_backward, aten.hardswish_backward, aten.hardsigmoid_backward)),
    e(aten.elu_backward.default, x(12, 6), 1.0, 1.0, 1.0, False, x(12, 6)), e(aten.softplus_backward.default, x(12, 6), x(12, 6), 1.0, 20.0),
    e(aten.hardshrink_backward.default, x(12, 6), x(12, 6), 0.5), e(aten.softshrink_backward.default, x(12, 6), x(12, 6), 0.5),
    e(aten.hardswish.default, x(12, 6)), e(aten._prelu_kernel.default, _image, u(1, 6, 1, 1)),
    e(aten._prelu_kernel_backward.default, x(6, 6, 4, 4), _image, u(1, 6, 1, 1)), e(aten.log_sigmoid_forward.default, x(12, 6)),
    e(aten.log_sigmoid_backward.default, x(12, 6), x(12, 6), u(12, 6)), e(aten.softplus.default, x(12, 6)), e(aten.exp.default, x(12, 6)), e(aten.log.default, u(12, 6)), e(aten.log1p.default, u(12, 6)),
    e(aten.pow.Tensor_Scalar, x(12, 6), 2), e(aten.sqrt.default, u(12, 6)), e(aten.rsqrt.default, u(12, 6)), e(aten.abs.default, x(12, 6)),
    e(aten.sin.default, x(12, 6)), e(aten.erf.default, x(12, 6)), e(aten.sign.default, x(12, 6)), e(aten.clamp.default, x(12, 6), -0.5, 0.5),
    e(aten.maximum.default, x(12, 6), x(12, 6)), e(aten.eq.Tensor, i(3, 12, 6), i(3, 12, 6)), e(aten.ne.Scalar, i(3, 12), 1),
    e(aten.gt.Tensor, x(12, 6), x(6)), e(aten.logical_and.default, m(12, 6), m(6)), e(aten.logical_not.default, m(12)),
    e(aten.bitwise_and.Tensor, m(12, 6), m(12, 6)), e(aten.remainder.Scalar, i(9, 12), 4), e(aten.isnan.default, x(12, 6)),
    e(aten.addcmul.default, x(12, 6), x(12, 6), x(6)), e(aten.lerp.Scalar, x(12, 6), x(12, 6), 0.3),
    e(aten.clone.default, x(12, 6)), e(aten.clone.default, x(6, 12).t(), memory_format=torch.contiguous_format),
    Example(aten._to_copy.default, (x(12, 6),), {"dtype": torch.float32}, tolerance=1e-5), e(aten._to_copy.default, x(12, 6), dtype=torch.int64),
    e(aten._to_copy.default, i(5, 12), **_F64), e(aten.lift_fresh_copy.default, x(12, 6)), e(aten.copy.default, x(12, 6), x(12, 6)),
    e(aten.where.self, m(12, 6), x(12, 6), x(6)), e(aten.where.self, m(12, 1), x(12, 6), x()), e(aten.fill.Scalar, x(12, 6), 2.0),
    e(aten.masked_fill.Scalar, x(12, 6), m(12, 6), -3.0), e(aten.masked_fill.Scalar, x(12, 6), m(6), -3.0),
    e(aten.masked_fill.Tensor, x(12, 6), m(12, 1), x()), e(aten.fill.Tensor, x(12, 6), x()),
    e(aten.masked_fill.Scalar, x(12, 6), m(12, 6), 0), e(aten.where.ScalarOther, m(12, 6), x(12, 6), 0.0), e(aten.where.ScalarOther, m(12, 6), x(12, 6), 1.0),
    e(aten.zeros_like.default, x(12, 6)), e(aten.ones_like.default, x(12, 6)), e(aten.full_like.default, x(12, 6), 2.5),
    shape_only(aten.empty_like.default, x(12, 6)),
)  # fmt: skip

_loss = (x(12, 6), x(12, 6))
_chances = (u(12, 6), u(12, 6))
_signs = torch.where(m(12, 6), 1.0, -1.0).double()
_scalar, _full = x(), x(12, 6)

LOSSES = (
    *(e(aten.mse_loss.default, *_loss, r) for r in (0, 1, 2)), e(aten.mse_loss.default, x(12, 1), x(12, 6)), e(aten.mse_loss.default, *_loss),
    e(aten.mse_loss.default, x(1, 6), x(12, 6), 1),
    *(e(aten.smooth_l1_loss.default, *_loss, r, 0.5) for r in (0, 1, 2)), *(e(aten.huber_loss.default, *_loss, r, 0.5) for r in (0, 1, 2)),
    *(e(aten.binary_cross_entropy.default, *_chances, None, r) for r in (0, 1, 2)), e(aten.binary_cross_entropy.default, *_chances, u(6)),
    e(aten.binary_cross_entropy.default, *_chances),
    *(e(aten.binary_cross_entropy_with_logits.default, *_loss, None, u(6), r) for r in (0, 1, 2)),
    e(aten.binary_cross_entropy_with_logits.default, *_loss), e(aten.binary_cross_entropy_with_logits.default, *_loss, u(12, 1)),
    *(e(aten.soft_margin_loss.default, x(12, 6), _signs, r) for r in (0, 1, 2)),
    *(e(aten.mse_loss_backward.default, _full if r == 0 else _scalar, *_loss, r) for r in (0, 1, 2)),
    *(e(aten.smooth_l1_loss_backward.default, _full if r == 0 else _scalar, *_loss, r, 0.5) for r in (0, 1, 2)),
    *(e(aten.huber_loss_backward.default, _full if r == 0 else _scalar, *_loss, r, 0.5) for r in (0, 1, 2)),
    *(e(aten.binary_cross_entropy_backward.default, _full if r == 0 else _scalar, *_chances, None, r) for r in (0, 1, 2)),
    e(aten.binary_cross_entropy_backward.default, _scalar, *_chances, u(6)), e(aten.binary_cross_entropy_backward.default, _scalar, *_chances),
    *(e(aten.soft_margin_loss_backward.default, _full if r == 0 else _scalar, x(12, 6), _signs, r) for r in (0, 1, 2)),
    Example(aten.nll_loss_forward.default, (_logits, _labels, _class_weight, 0, -100), absent=(1,)),
    *(e(aten.nll_loss_forward.default, _logits, _labels, w, r, -100) for r in (1, 2) for w in (None, _class_weight)),
    *(
        e(aten.nll_loss_backward.default, x(12) if r == 0 else _scalar, _logits, _labels, _class_weight, r, -100, _weight_of_all)
        for r in (0, 1, 2)
    ),
    *(e(aten.nll_loss2d_forward.default, _maps, _map_labels, _class_weight, r, -100) for r in (1, 2)),
    Example(aten.nll_loss2d_forward.default, (_maps, _map_labels, None, 0, -100), absent=(1,)),
    *(
        e(aten.nll_loss2d_backward.default, x(6, 3, 3) if r == 0 else _scalar, _maps, _map_labels, None, r, -100, torch.tensor(54.0).double())
        for r in (0, 1, 2)
    ),
    Example(aten.nll_loss_forward.default, (_words, _word_labels, _word_weight, 0, -100), absent=(1,)),
    *(e(aten.nll_loss_forward.default, _words, _word_labels, w, r, -100) for r in (1, 2) for w in (None, _word_weight)),
    e(aten.nll_loss_forward.default, _words, _word_labels.clamp(min=3), _word_weight, 1, 3),
    *(
        e(aten.nll_loss_backward.default, x(7) if r == 0 else _scalar, _words, _word_labels, w, r, -100, _weight_of_words)
        for r in (0, 1, 2) for w in (None, _word_weight)
    ),
    *(e(aten.nll_loss2d_forward.default, _pixels, _pixel_labels, u(6), r, 2) for r in (1, 2)),
    Example(aten.nll_loss2d_forward.default, (_pixels, _pixel_labels, None, 0, 2), absent=(1,)),
    *(
        e(aten.nll_loss2d_backward.default, x(2, 6, 3) if r == 0 else _scalar, _pixels, _pixel_labels, u(6), r, 2, torch.tensor(7.0).double())
        for r in (0, 1, 2)
    ),
)  # fmt: skip

PRODUCTS = (
    e(ours.chosen.default, torch.tensor(True), x(12, 6), x(12, 6)), e(ours.chosen.default, torch.tensor(False), x(12, 6), None),
    e(ours.present.default, x(12, 6)), e(ours.unless.default, x(), torch.tensor(True), False, "raised"),
    e(ours.grouped_product.default, x(6, 12), x(3, 12, 6), torch.tensor([1, 4, 6], dtype=torch.int32)),
    e(ours.grouped_outer.default, x(6, 12), x(6, 6), torch.tensor([1, 4, 6], dtype=torch.int32)),
    e(aten.mm.default, x(12, 6), x(6, 12)), e(aten.bmm.default, x(6, 12, 6), x(6, 6, 12)), e(aten.addmm.default, x(12), x(6, 6), x(6, 12)),
    e(aten.addmm.default, x(6, 12), x(6, 6), x(6, 12), beta=0.5, alpha=2.0), e(aten.addmm.default, x(6, 1), x(6, 6), x(6, 12)),
    e(aten.baddbmm.default, x(6, 12, 12), x(6, 12, 6), x(6, 6, 12)), e(aten.baddbmm.default, x(1, 12, 1), x(6, 12, 6), x(6, 6, 12)),
    e(aten.mv.default, x(12, 6), x(6)), e(aten.dot.default, x(12), x(12)),
    e(aten.convolution.default, x(6, 6, 8), x(4, 6, 3), x(4), [1], [1], [1], False, [0], 1),
    e(aten.convolution.default, _image, x(6, 3, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2),
    e(aten.convolution.default, _image, x(6, 4, 2, 2), x(4), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    e(aten.convolution.default, _volume, x(2, 6, 3, 3, 3), x(2), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    e(
        aten.convolution_backward.default, x(6, 4, 4, 4), _image, x(4, 6, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        [True, True, True],
    ),
    e(
        aten.convolution_backward.default, x(6, 4, 4, 4), _image, x(4, 6, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        [False, True, False],
    ),
    e(ours.attention.default, _q, _k, _v, None, False, 0.5), e(ours.attention.default, _q, _k, _v, None, True, 0.5),
    e(ours.attention.default, _q, _k, _v, _look, False, 0.5), e(ours.attention.default, _q, _k, _v, _added, False, 0.5),
    *(
        e(ours.attention_backward.default, x(6, 6, 3, 4), _q, _k, _v, *ours.attention(_q, _k, _v, mask, causal, 0.5), mask, causal, 0.5)
        for mask, causal in ((None, True), (_look, False), (_added, False))
    ),
    e(aten._scaled_dot_product_flash_attention_for_cpu.default, _q, _k, _v, 0.0, True),
    e(aten.convolution.default, _image, x(12, 6, 3, 3), x(12), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    e(aten.convolution.default, _image, x(6, 12, 2, 2), x(12), [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    e(aten.convolution.default, x(6, 12, 8), x(12, 2, 3), x(12), [1], [1], [1], False, [0], 6),
    e(aten.convolution.default, x(6, 12, 8), x(12, 1, 3), None, [1], [1], [1], False, [0], 12),
    e(aten.convolution.default, x(6, 12, 8), x(12, 2, 3), x(12), [1], [1], [1], True, [0], 6),
    e(
        aten.convolution_backward.default, x(6, 12, 4, 4), _image, x(12, 6, 3, 3), [12], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
        [True, True, True],
    ),
    e(
        aten.convolution_backward.default, x(6, 12, 8, 8), _image, x(6, 12, 2, 2), [12], [2, 2], [0, 0], [1, 1], True, [0, 0], 1,
        [True, True, True],
    ),
    e(
        aten.convolution_backward.default, x(6, 12, 8), x(6, 12, 8), x(12, 1, 3), [12], [1], [1], [1], False, [0], 12,
        [True, True, True],
    ),
    e(
        aten.convolution_backward.default, x(6, 12, 8), x(6, 12, 8), x(12, 2, 3), None, [1], [1], [1], False, [0], 6,
        [True, True, False],
    ),
    e(aten.embedding.default, x(12, 6), i(12, 12, 6)), e(aten.embedding.default, x(12, 5), i(12, 7), 3),
    e(aten.embedding_dense_backward.default, x(12, 6), i(12, 12), 12, -1, False),
    e(aten.embedding_dense_backward.default, x(20, 5), i(12, 20), 12, 3, False),
    e(aten.embedding_dense_backward.default, x(20, 5), i(12, 20), 12, 3, True),
    e(aten.embedding.default, x(9, 6), i(9, 12, 6)), e(aten.embedding.default, x(9, 6), i(9, 12), 2),
    e(aten.embedding_dense_backward.default, x(12, 6, 6), i(9, 12, 6), 9, -1, False),
    e(aten.embedding_dense_backward.default, x(12, 6), i(3, 12), 9, 2, False),
    e(aten.embedding_dense_backward.default, x(12, 6), i(3, 12), 9, -1, True),
)  # fmt: skip

REDUCTIONS = (
    e(aten.sum.default, x(12, 6)), e(aten.sum.dim_IntList, x(12, 6, 3), [0]), e(aten.sum.dim_IntList, x(12, 6, 3), [1, -1], True),
    e(aten.sum.dim_IntList, x(6, 12), None), e(aten.sum.default, i(5, 12)), e(aten.sum.default, m(12, 6)),
    e(aten.sum.dim_IntList, x(12, 6), [0, 1], dtype=torch.float64),
    e(aten.mean.default, x(12, 6)), e(aten.mean.dim, x(12, 6, 3), [0, 2]), e(aten.mean.dim, x(12, 6, 3), [-1], True),
    e(aten.mean.dim, x(12, 6), None), Example(aten.mean.default, (x(12, 6).float(),), _F64, tolerance=1e-6),
    e(aten.amax.default, x(12, 6, 3), [1]), e(aten.amax.default, x(12, 6)), e(aten.amin.default, x(12, 6, 3), [-1], True),
    e(aten.max.dim, x(12, 6, 3), 1), e(aten.max.default, x(12, 6)), e(aten.max.other, x(12, 6), x(12, 6)),
    e(aten.min.dim, x(12, 6, 3), 0, True), e(aten.min.default, x(12)), e(aten.argmax.default, x(12, 6, 3), 1), e(aten.argmax.default, x(12, 6)),
    e(aten.argmin.default, x(12, 6, 3), -1, True), e(aten.any.dim, m(12, 6), 1), e(aten.any.default, m(12, 6)), e(aten.all.dim, m(12, 6), 0),
    e(aten.all.default, m(12, 6)), e(aten.prod.default, u(12)), e(aten.prod.dim_int, x(12, 6), 1), e(aten.logsumexp.default, x(12, 6, 3), [1]),
    e(aten.var.correction, x(12, 6, 3), [1]), e(aten.var.correction, x(12, 6), None), e(aten.std.correction, x(12, 6, 3), [2], correction=0),
    e(aten.var_mean.correction, x(12, 6, 3), [1, 2], correction=0, keepdim=True), e(aten.linalg_vector_norm.default, x(12, 6, 3), 2, [1]),
    e(aten.linalg_vector_norm.default, x(12, 6)), e(aten.norm.ScalarOpt_dim, x(12, 6, 3), 2, [2], True), e(aten.norm.Scalar, x(12, 6), 2),
    e(aten._softmax.default, x(12, 6, 3), 1, False), e(aten._softmax.default, x(12, 6), -1, False), e(aten._softmax.default, x(12, 6), 0, False),
    e(aten._log_softmax.default, x(12, 6, 3), -1, False), e(aten._softmax_backward_data.default, x(12, 6), x(12, 6).softmax(1), 1, torch.float64),
    e(aten._log_softmax_backward_data.default, x(12, 6), x(12, 6).log_softmax(1), -1, torch.float64),
    e(aten.cumsum.default, x(12, 6), 1), e(aten.cumsum.default, x(12, 6), 0), e(aten.cumprod.default, x(12, 6), 1),
    e(aten.logcumsumexp.default, x(12, 6), 1), e(aten.sort.default, x(12, 6)), e(aten.sort.default, x(12, 6), 0, True),
    e(aten.glu.default, x(3, 24), 1), e(aten.glu_backward.default, x(3, 12), x(3, 24), -1), e(aten.any.dims, m(12, 6, 3), [1, 2]), e(aten.all.dims, m(12, 6, 3), [1]),
    e(aten.amax.default, i(9, 12, 6), [0], True), e(aten.linalg_vector_norm.default, x(12, 6), 3), e(aten.linalg_vector_norm.default, x(12, 6), 1), e(aten.linalg_vector_norm.default, x(12, 6), 1, [0], True),
    e(aten.logsumexp.default, x(3, 12), [1], True), e(aten._log_softmax.default, x(3, 12), 1, False), e(aten._softmax.default, x(3, 12, 2), 1, False),
    e(aten._softmax_backward_data.default, x(3, 12), x(3, 12).softmax(1), 1, torch.float64),
    e(aten._log_softmax_backward_data.default, x(3, 12), x(3, 12).log_softmax(1), -1, torch.float64),
    Example(aten._log_softmax.default, (x(3, 12).bfloat16(), 1, False), tolerance=2e-2), Example(aten._softmax.default, (x(3, 12).bfloat16(), 1, False), tolerance=2e-2),
    e(aten._log_softmax.default, torch.full((3, 12), -torch.inf, dtype=torch.float64).scatter(1, i(12, 3, 1), 1.0), 1, False),
    e(aten.glu.default, x(12, 6, 6), 1), e(aten.glu_backward.default, x(12, 3), x(12, 6), -1), e(aten.sort.stable, x(12, 6), stable=True, dim=1), e(aten.topk.default, x(12, 6), 3), e(aten.topk.default, x(12, 6), 2, 0, False),
)  # fmt: skip

NORMS = (
    e(aten.native_layer_norm.default, _rows, [5], _gain, _shift, 1e-5), e(aten.native_layer_norm.default, _rows, [3, 5], None, None, 1e-5),
    e(aten.native_layer_norm_backward.default, x(12, 3, 5), _rows, [5], _row_mean, _row_rstd, _gain, _shift, [True, True, True]),
    e(aten.native_layer_norm_backward.default, x(12, 3, 5), _rows, [5], _row_mean, _row_rstd, None, None, [True, False, False]),
    e(aten.native_layer_norm.default, x(3, 12), [12], u(12), x(12), 1e-5), e(aten.native_layer_norm.default, x(3, 12, 6), [12, 6], u(12, 6), x(12, 6), 1e-5),
    e(aten.native_layer_norm.default, x(3, 12), [12], None, None, 1e-5),
    e(aten.native_layer_norm_backward.default, x(3, 12), _long, [12], _long_mean, _long_rstd, _long_gain, x(12), [True, True, True]),
    e(aten.native_layer_norm_backward.default, x(3, 12), _long, [12], _long_mean, _long_rstd, None, None, [True, False, False]),
    e(aten.native_group_norm.default, _image, _channel_gain, _channel_shift, 6, 6, 16, 3, 1e-5),
    e(
        aten.native_group_norm_backward.default, x(6, 6, 4, 4), _image, _group_mean, _group_rstd, _channel_gain, 6, 6, 16, 3,
        [True, True, True],
    ),
    e(aten._weight_norm_interface.default, _direction, _length, 0),
    e(aten._weight_norm_interface_backward.default, x(6, 4), _direction, _length, _direction_norm, 0),
    e(ours.batch_norm.default, _image, _channel_gain, _channel_shift, x(6), u(6), 0.1, 1e-5),
    e(ours.batch_norm.default, x(12, 6), None, None, x(6), u(6), 0.3, 1e-3), e(ours.batch_norm.default, _volume, x(6), x(6), x(6), u(6), 0.1, 1e-5),
    e(ours.batch_norm_backward.default, x(6, 6, 4, 4), _image, _channel_gain, _batch_mean, _batch_invstd, 1e-5),
    e(aten.native_batch_norm.default, _folded, x(12), x(12), None, None, True, 0.1, 1e-5),
    e(aten.native_batch_norm.default, _image, x(6), x(6), x(6), u(6), False, 0.1, 1e-5),
    e(
        aten.native_batch_norm_backward.default, x(1, 12, 4, 4), _folded, x(12), None, None, _folded_mean, _folded_rstd, True, 1e-5,
        [True, True, True],
    ),
)  # fmt: skip

IMAGES = (
    e(aten.max_pool2d_with_indices.default, _image, [2, 2], [2, 2]), e(aten.max_pool2d_with_indices.default, x(6, 4, 4), [2, 2], [2, 2]),
    e(aten.max_pool2d_with_indices_backward.default, x(*_pool2.shape), _image, [2, 2], [2, 2], [0, 0], [1, 1], False, _where2),
    e(aten.avg_pool2d.default, _image, [3, 3], [1, 1], [1, 1]), e(aten.avg_pool2d_backward.default, x(6, 6, 2, 2), _image, [2, 2], [2, 2], [0, 0], False, True, None),
    e(aten._adaptive_avg_pool2d.default, _image, [2, 2]), e(aten._adaptive_avg_pool2d_backward.default, x(6, 6, 2, 2), _image),
    e(aten.adaptive_max_pool2d.default, _image, [2, 2]), e(aten.adaptive_max_pool2d_backward.default, x(6, 6, 2, 2), _image, _adaptive_where),
    e(aten.max_pool3d_with_indices.default, _volume, [2, 2, 2], [2, 2, 2]), e(aten.max_pool3d_with_indices.default, x(6, 6, 4, 4), [2, 2, 2], [2, 2, 2]),
    e(aten.max_pool3d_with_indices_backward.default, x(*_pool3.shape), _volume, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, _where3),
    e(aten.avg_pool3d.default, _volume, [2, 2, 2]), e(aten.avg_pool3d_backward.default, x(6, 6, 2, 2, 2), _volume, [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
    e(aten._adaptive_avg_pool3d.default, _volume, [2, 2, 2]), e(aten._adaptive_avg_pool3d_backward.default, x(6, 6, 2, 2, 2), _volume),
    e(aten.upsample_nearest1d.default, _line, [16]), e(aten.upsample_nearest2d.default, _image, [8, 8]), e(aten.upsample_nearest3d.default, _volume, [8, 8, 8]),
    e(aten.upsample_nearest2d.vec, _image, None, [2.0, 2.0]), e(aten.upsample_linear1d.default, _line, [16], False),
    e(aten.upsample_bilinear2d.default, _image, [8, 8], False), e(aten.upsample_bilinear2d.vec, _image, None, True, [2.0, 2.0]),
    e(aten.upsample_bicubic2d.default, _image, [8, 8], False), e(aten.upsample_trilinear3d.default, _volume, [8, 8, 8], False),
    e(aten.upsample_nearest1d_backward.default, x(6, 6, 16), [16], [6, 6, 8]), e(aten.upsample_nearest2d_backward.default, x(6, 6, 8, 8), [8, 8], [6, 6, 4, 4]),
    e(aten.upsample_nearest3d_backward.default, x(6, 6, 8, 8, 8), [8, 8, 8], [6, 6, 4, 4, 4]),
    e(aten.upsample_linear1d_backward.default, x(6, 6, 16), [16], [6, 6, 8], False),
    e(aten.upsample_bilinear2d_backward.default, x(6, 6, 8, 8), [8, 8], [6, 6, 4, 4], False),
    e(aten.upsample_bicubic2d_backward.default, x(6, 6, 8, 8), [8, 8], [6, 6, 4, 4], False),
    e(aten.upsample_trilinear3d_backward.default, x(6, 6, 8, 8, 8), [8, 8, 8], [6, 6, 4, 4, 4], False),
    *(e(op.default, _line, [1, 2]) for op in (aten.reflection_pad1d, aten.replication_pad1d)),
    *(e(op.default, _image, [1, 2, 0, 1]) for op in (aten.reflection_pad2d, aten.replication_pad2d)),
    *(e(op.default, x(6, 6, 11), _line, [1, 2]) for op in (aten.reflection_pad1d_backward, aten.replication_pad1d_backward)),
    *(e(op.default, x(6, 6, 5, 7), _image, [1, 2, 0, 1]) for op in (aten.reflection_pad2d_backward, aten.replication_pad2d_backward)),
    e(aten.grid_sampler_2d.default, _image, u(6, 3, 3, 2), 0, 0, False), e(aten.im2col.default, _image, [2, 2], [1, 1], [0, 0], [2, 2]),
    e(aten.col2im.default, x(6, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]), e(aten.pixel_shuffle.default, x(6, 12, 4, 4), 2),
    e(aten.pixel_shuffle.default, x(12, 4, 4), 2), e(aten.pixel_unshuffle.default, _image, 2),
)  # fmt: skip

INDEXING = (
    e(aten.index.Tensor, x(12, 6, 3), [i(12, 6)]), e(aten.index.Tensor, x(6, 12, 3), [None, i(12, 6)]), e(aten.index.Tensor, x(6, 12, 6), [i(6, 6, 1), i(12, 12)]),
    e(aten.index.Tensor, x(12, 6, 6), [torch.arange(12), i(6, 12)]), e(aten.index.Tensor, x(12, 6, 6), [i(12, 6), None, i(6, 6)]),
    e(aten.index.Tensor, x(12, 6), [i(12, 12, 6)]), e(aten._unsafe_index.Tensor, _image, [None, None, i(4, 6, 1), i(4, 6)]),
    e(aten.index_put.default, Zeros((12, 6)), [i(12, 6)], x(6, 6), True), e(aten.index_put.default, Zeros((6, 9, 6)), [None, i(9, 12)], x(6, 12, 6), True),
    e(aten.index_put.default, Zeros((6, 9, 3)), [None, i(9, 6)], x(6, 3), True), e(aten.index_put.default, Zeros((9, 6)), [i(9, 12)], x(12, 6), False),
    e(aten.index_put.default, Zeros((12, 9)), [torch.arange(12), i(9, 12)], x(12), True), e(aten.index_put.default, Zeros((9, 6)), [i(9, 12)], x(1, 6), True),
    e(aten.index_put.default, x(9, 6), [i(9, 12)], x(12, 6), True), e(aten.index_put.default, Zeros((9, 12, 6)), [i(9, 6, 1), i(12, 12)], x(6, 12, 6), True),
    e(aten._unsafe_index_put.default, Zeros((6, 6, 4, 4)), [None, None, i(4, 6, 1), i(4, 6)], x(6, 6, 6, 6), True),
    e(aten.gather.default, x(12, 6), 1, i(6, 12, 1)), e(aten.gather.default, x(12, 6), 1, i(6, 6, 3)), e(aten.gather.default, x(12, 6, 6), 0, i(12, 3, 6, 6)),
    e(aten.scatter.src, x(12, 6), 1, i(6, 12, 1), x(12, 1)), e(aten.scatter.value, x(12, 6), 1, i(6, 12, 1), 1.5),
    e(aten.scatter_add.default, x(12, 6), 1, i(6, 12, 8), x(12, 8)), e(aten.scatter_add.default, x(12, 6), 0, i(12, 3, 6), x(3, 6)),
    e(aten.scatter_reduce.two, x(12, 6), 1, i(6, 12, 8), x(12, 8), "amax"),
    e(aten.index.Tensor, x(12, 5), [i(12, 7) - 12]), e(aten.index.Tensor, x(5, 12, 2), [None, i(12, 3, 2)]), e(aten.index.Tensor, m(12, 5), [i(12, 7)]),
    e(aten.index_put.default, x(12, 5), [i(12, 7)], x(7, 5), True), e(aten.index_put.default, x(12, 5), [torch.tensor([3, -1, 7])], x(5), False),
    e(aten.index_put.default, x(3, 12, 6), [None, torch.tensor([3, 1, 7])], x(3, 3, 6), False), e(aten.gather.default, m(5, 12), 1, i(12, 5, 7)),
    e(aten.gather.default, x(5, 12), 1, i(12, 5, 7)), e(aten.gather.default, x(5, 7), -1, i(7, 5, 12)),
    e(aten.scatter.src, x(5, 12), 1, i(12, 5, 1), x(5, 1)), e(aten.scatter.value, x(5, 12), -1, i(12, 5, 1), 1.5), e(aten.scatter.value, m(5, 12), 1, i(12, 5, 1), True),
    e(aten.scatter_add.default, x(5, 12), 1, i(12, 5, 7), x(5, 7)), e(aten.scatter_add.default, x(5, 7), 1, i(7, 5, 12), x(5, 12)),
    e(aten.scatter_reduce.two, x(5, 12), 1, i(12, 5, 8), x(5, 8), "amax"),
    e(aten.index_add.default, x(12, 6), 0, i(12, 7), x(7, 6)), e(aten.index_add.default, x(6, 5), 1, i(5, 12), x(6, 12), alpha=2.0),
    e(aten.index_select.default, x(12, 5), 0, i(12, 7)), e(aten.index_select.default, x(5, 12), -1, i(12, 7)),
    e(aten.index_select.default, x(12, 6), 1, i(6, 6)), e(aten.index_select.default, x(9, 6), 0, i(9, 12)),
)  # fmt: skip

VIEWS = (
    *(e(aten.view.default, x(*a), list(b)) for a, b in (
        ((12, 6), (72,)), ((72,), (12, 6)), ((12, 3, 4), (36, 4)), ((36, 4), (12, 3, 4)), ((6, 1, 4), (6, 4)), ((6, 4), (1, 6, 1, 4)),
        ((3, 12, 4), (36, 4)), ((36, 4), (3, 12, 4)), ((12, 6), (6, 12)), ((3, 6), (2, 9)), ((12, 5, 6), (12, 30)), ((2, 12), (24,)),
        ((24,), (2, 12)), ((24, 6), (2, 2, 6, 6)), ((2, 2, 6, 6), (24, 6)), ((4, 6), (24,)), ((12,), (12, 1)), ((8, 6), (4, 12)),
    )),
    e(aten._unsafe_view.default, x(12, 6), [72]), e(aten.reshape.default, x(6, 12).t(), [72]), e(aten._reshape_copy.default, x(12, 6), [6, 2, 6]),
    e(aten.expand.default, x(1, 6), [12, 6]), e(aten.expand.default, x(6), [12, -1]), e(aten.expand.default, x(12, 1, 6), [12, 6, 6]), e(aten.expand.default, x(), [12]),
    e(aten.permute.default, x(12, 6, 3), [2, 0, 1]), e(aten.permute.default, x(12, 6, 3), [-1, 1, 0]), e(aten.transpose.int, x(12, 6, 3), 0, -1),
    e(aten.t.default, x(12, 6)), e(aten.t.default, x(12)), e(aten.unsqueeze.default, x(12, 6), 1), e(aten.unsqueeze.default, x(12, 6), -1), e(aten.squeeze.dim, x(12, 1, 6), 1),
    e(aten.squeeze.default, x(1, 12, 1)), e(aten.squeeze.dims, x(12, 1, 6, 1), [1, 3]), e(aten.detach.default, x(12)), e(aten.alias.default, x(12)),
    e(aten.slice.Tensor, x(12, 6), 1, 2, 5), e(aten.slice.Tensor, x(12, 6), 0, 0, 9, 2), e(aten.slice.Tensor, x(12, 6), -1, -2), e(aten.flip.default, x(12, 6), [1]),
    e(aten.constant_pad_nd.default, x(12, 6), [1, 2]), e(aten.constant_pad_nd.default, x(12, 6), [0, 0, 1, 1], 3.0), e(aten.constant_pad_nd.default, x(12, 6), [0, -1]),
    e(aten.roll.default, x(12, 6), [2], [1]), e(aten.roll.default, x(12, 6), [2]), e(aten.select.int, x(12, 6, 3), 1, 2), e(aten.select.int, x(12, 6), 0, -1),
    e(aten.split.Tensor, x(12, 6), 4), e(aten.split.Tensor, x(12, 6), 2, 1), e(aten.split_with_sizes.default, x(12, 6), [1, 5], -1), e(aten.chunk.default, x(12, 6), 2, 1),
    e(aten.unsafe_split.Tensor, x(12, 6), 2, 1), e(aten.unsafe_split_with_sizes.default, x(12, 6), [2, 4], 1), e(aten.unsafe_chunk.default, x(12, 6), 2, 1),
    e(aten.unbind.int, x(12, 6, 2), 2), e(aten.unbind.int, x(3, 12)), e(aten.cat.default, [x(12, 6), x(12, 3)], 1), e(aten.cat.default, [x(6, 6), x(12, 6)]),
    e(ours.beside.default, [x(6, 6), x(12, 6)]),
    e(aten.stack.default, [x(12, 6), x(12, 6)], -1), e(aten.stack.default, [x(12, 6), x(12, 6)], 1), e(aten.repeat.default, x(12, 6), [1, 3]),
    e(aten.repeat.default, x(12, 6), [2, 1, 1]), e(aten.slice_backward.default, x(12, 3), [12, 6], 1, 2, 5, 1), e(aten.slice_backward.default, x(4, 6), [12, 6], 0, 1, 5, 1),
    e(aten.split.Tensor, x(2, 36), 12, 1), e(aten.split_with_sizes.default, x(2, 72), [24, 24, 24], -1), e(aten.chunk.default, x(24, 2), 2), e(aten.unsafe_chunk.default, x(2, 24), 2, 1),
    e(aten.split_with_sizes.default, x(2, 48), [24, 12, 12], 1), e(aten.cat.default, [x(2, 12), x(2, 12)], 1), e(aten.cat.default, [x(24, 2), x(12, 2), x(12, 2)]),
    e(aten.slice.Tensor, x(2, 36), 1, 12, 24), e(aten.slice.Tensor, x(2, 36), 1, 12, 9223372036854775807), e(aten.slice.Tensor, x(36, 2), 0, -12), e(aten.slice.Tensor, x(12, 2), 0),
    e(aten.slice_backward.default, x(2, 12), [2, 36], 1, 12, 24, 1), e(aten.slice_backward.default, x(24, 2), [36, 2], 0, 12, 9223372036854775807, 1),
    e(aten.select.int, x(3, 12), 1, 7), e(aten.select.int, m(3, 12), 1, 7), e(aten.select_backward.default, x(3), [3, 12], 1, -2), e(aten.repeat.default, x(12, 6), [2, 3]),
    e(aten.new_zeros.default, x(12, 6), [6, 5]), e(aten.new_full.default, x(6), [12, 6], 2.5),
    e(aten.select_backward.default, x(12, 6), [12, 3, 6], 1, 2), e(aten.slice_scatter.default, x(12, 6), x(12, 3), 1, 2, 5), e(aten.select_scatter.default, x(12, 3, 6), x(12, 6), 1, 2),
    e(aten.zeros.default, [12, 6], **_F64), e(aten.ones.default, [12, 6], **_F64), e(aten.full.default, [12, 6], 2.5, **_F64), shape_only(aten.empty.memory_format, [12, 6], **_F64),
    e(aten.new_zeros.default, x(3), [12, 6]), e(aten.new_ones.default, x(3), [12, 6]), e(aten.new_full.default, x(3), [12, 6], 2.5), shape_only(aten.new_empty.default, x(3), [12, 6]),
    e(aten.tril.default, x(12, 6, 6)), e(aten.triu.default, x(12, 6, 6), 1), e(aten.tril.default, x(6, 6)),
)  # fmt: skip

_sequence, _cell = x(3, 6, 4), (x(20, 4), x(20, 5), x(20), x(20), x(6, 5), x(6, 5))
_plain_cells = [
    ((x(gates * 5, 4), x(gates * 5, 5), x(gates * 5), x(gates * 5), x(6, 5)), kind, reverse)
    for gates, kind in ((1, 0), (1, 1), (3, 3))
    for reverse in (False, True)
]

RECURRENT = (
    *(e(ours.lstm_layer.default, _sequence, *_cell, reverse) for reverse in (False, True)),
    *(
        e(
            ours.lstm_layer_backward.default, x(3, 6, 5), x(6, 5), x(6, 5), _sequence, *_cell,
            *ours.lstm_layer(_sequence, *_cell, reverse), reverse,
        )
        for reverse in (False, True)
    ),
    *(e(ours.rnn_layer.default, _sequence, *cell, *how) for cell, *how in _plain_cells),
    *(
        e(
            ours.rnn_layer_backward.default, x(3, 6, 5), x(6, 5), _sequence, *cell,
            *[ours.rnn_layer(_sequence, *cell, *how)[at] for at in (0, 2, 3)], *how,
        )
        for cell, *how in _plain_cells
    ),
)  # fmt: skip

DRAWN = (
    drawn(ours.bernoulli.default, [12, 6], torch.float64, 0.3),
    drawn(ours.bernoulli.default, [3, 12, 6], torch.float64, 0.7),
    drawn(ours.uniform.default, [12, 6, 6], torch.float64, -1.0, 2.0),
    drawn(ours.normal.default, [6, 12], torch.float64, 1.0, 2.0),
    drawn(ours.randint.default, [12], torch.int64, 0, 1000),
)

EXAMPLES: tuple[Example, ...] = (
    *POINTWISE,
    *LOSSES,
    *PRODUCTS,
    *REDUCTIONS,
    *NORMS,
    *IMAGES,
    *INDEXING,
    *VIEWS,
    *RECURRENT,
    *DRAWN,
)
