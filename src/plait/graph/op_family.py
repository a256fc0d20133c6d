"""What kind of op a node calls.

In: the target of a node. Out: a word for people (`matmul`, `elementwise`, ...), and whether the result lies in the
memory of the input. Never looks at shapes.
"""

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from plait.torch_private.ops import OpOverload, base_name

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matmul": (
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "dot",
            "mv",
            "addmv",
            "_scaled_mm",
            "_grouped_mm",
            "grouped_product",
            "grouped_outer",
            "scaled_product",
            "rounded_product",
            "scaled_gradient",
        ),
        "convolution": ("convolution", "convolution_backward"),
        "attention": ("attention", "attention_backward"),
        "recurrent": ("lstm_layer", "lstm_layer_backward", "rnn_layer", "rnn_layer_backward"),
        "normalization": (
            *(
                "native_layer_norm",
                "native_layer_norm_backward",
                "native_group_norm",
                "native_group_norm_backward",
            ),
            *("batch_norm", "batch_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
        ),
        "softmax": (
            "_softmax",
            "_softmax_backward_data",
            "_log_softmax",
            "_log_softmax_backward_data",
            "logsumexp",
        ),
        "loss": (
            *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
            *("mse_loss", "mse_loss_backward", "binary_cross_entropy", "binary_cross_entropy_backward"),
            *("binary_cross_entropy_with_logits", "smooth_l1_loss", "smooth_l1_loss_backward"),
            *("huber_loss", "huber_loss_backward", "soft_margin_loss", "soft_margin_loss_backward"),
        ),
        "reduction": (
            *(
                "sum",
                "mean",
                "amax",
                "amin",
                "max",
                "min",
                "argmax",
                "argmin",
                "prod",
                "any",
                "all",
                "var",
                "var_mean",
            ),
            *("std", "linalg_vector_norm", "norm", "cumsum", "count_nonzero"),
        ),
        "indexing": (
            *(
                "embedding",
                "embedding_dense_backward",
                "index",
                "index_put",
                "index_select",
                "gather",
                "scatter",
            ),
            *(
                "scatter_add",
                "select_scatter",
                "slice_scatter",
                "select_backward",
                "slice_backward",
                "cat",
                "stack",
            ),
            *("index_add", "constant_pad_nd", "flip", "roll", "topk", "sort"),
        ),
        "random": ("bernoulli", "uniform", "normal", "randint"),
        "creation": (
            *(
                "fill",
                "full",
                "full_like",
                "zeros",
                "zeros_like",
                "ones",
                "ones_like",
                "empty",
                "empty_like",
                "arange",
                "eye",
            ),
            *(
                "new_zeros",
                "new_ones",
                "new_full",
                "new_empty",
                "new_empty_strided",
                "scalar_tensor",
                "empty_strided",
            ),
        ),
        "copy": ("clone", "copy", "_to_copy", "lift_fresh_copy"),
    }
)
_FAMILY_OF: Mapping[str, str] = MappingProxyType(
    {name: kind for kind, names in _NAMES.items() for name in names}
)
_SHARES_MEMORY = ("_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk")
"""Functional by their schema, but they return the memory that they were given."""


def family(target: Any) -> str:
    """The kind of op, as a word."""
    if target is operator.getitem:
        return "view"
    if not isinstance(target, OpOverload):
        return "other"
    name = base_name(target)
    known = _FAMILY_OF.get(name)
    if known is not None:
        return known
    if is_view(target):
        return "view"
    if "pool" in name:
        return "pooling"
    # Backward formulas of elementwise functions are elementwise, but not all carry torch's tag.
    return "elementwise" if torch.Tag.pointwise in target.tags or name.endswith("_backward") else "other"


def is_view(target: Any) -> bool:
    """Whether the result lies in the memory of the first argument."""
    if not isinstance(target, OpOverload):
        return False
    return bool(target.is_view) or base_name(target) in _SHARES_MEMORY
