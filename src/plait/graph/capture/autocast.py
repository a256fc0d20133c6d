"""Autocast on processors' tensors by the op lists of the device that a step will run on.

In: a job, a kind of device. Out: where its forward runs while it is captured, or compared. Capture sees tensors of
processors only, whose autocast leaves layer norm, softmax and powers in 16 bits; that of CUDA computes them in float32,
and its kernels refuse what the former mixes. It never changes what is not under autocast.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.job.job import Job
from plait.torch_private import pytree

_FLOAT32 = frozenset({
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist",
    "cosh", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp",
    "expm1", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log1p", "log2", "log_softmax", "logsumexp", "margin_ranking_loss", "mse_loss", "multi_margin_loss",
    "multilabel_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal",
    "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "tan",
    "triplet_margin_loss",
})  # fmt: skip
"""Functions that CUDA's autocast computes in float32 (torch's documentation of `torch.amp`, by their names there)."""
_SHORT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions whose kernels for whole layers get all of what they are called with in autocast's dtype."""


class _CudaLists(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _FLOAT32 | _SHORT or not torch.is_autocast_enabled("cpu"):
            return func(*args, **(kwargs or {}))
        cast = cast_all if name in _SHORT else partial(pytree.tree_map, _wide)
        args, kwargs = cast((tuple(args), dict(kwargs or {})))
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


def cast_all(values: Any) -> Any:
    """Tensors that autocast casts, in its dtype."""
    if not torch.is_autocast_enabled("cpu"):
        return values
    dtype = torch.get_autocast_dtype("cpu")

    def cast(value: Any) -> Any:
        is_cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if is_cast else value

    return pytree.tree_map(cast, values)


@contextlib.contextmanager
def autocast_like(job: Job, device_type: str) -> Iterator[None]:
    """`job.autocast` on processors' tensors, as it would be on a device of this type."""
    lists = _CudaLists() if device_type == "cuda" and job.precision != "fp32" else contextlib.nullcontext()
    with lists, job.autocast("cpu"):
        yield
