"""Random numbers that do not depend on how a tensor is split.

In: a key and an op id. Out: torch ops `plait::bernoulli`, `uniform`, `normal`, `randint`, whose elements are a hash of
(seed, step, micro-batch, op, global sample, position in the unsharded tensor). So one process, N ranks, a slice of a
tensor and a recomputed activation see the same numbers, and there is no generator state to save. It never decides which
dim holds the samples (the placement pass sets that) and never touches torch's generators.

Each op takes `key`, an int64 tensor (seed, step, first sample of this rank's share; the first two mixed) that
`random_key` makes, the id of the op, the shape of the piece wanted and the dtype; then, by keyword:

    batch_dim         the dim that holds samples; -1: none, and the numbers are the same on every rank
    rows_per_sample   consecutive indices of that dim that belong to one sample (T for a [B*T, D] tensor)
    full, start       extents of the unsharded tensor and the first index of the piece, one per dim; empty: not sliced.
                      The entry at batch_dim is ignored: its start is key[2] * rows_per_sample
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops.random_hash import generate, mix64

__all__ = [
    "IMPLEMENTATIONS",
    "RANGE_LIMIT",
    "SMALLEST",
    "bernoulli",
    "normal",
    "randint",
    "random_key",
    "uniform",
]

RANGE_LIMIT = 1 << 31
"""Widest `high - low` of randint: its product with 32 random bits must fit in an int64."""
SMALLEST = 2.0**-33
"""In place of a uniform 0, of which no logarithm could be taken."""


def random_key(
    *, seed: int, step: int, micro_batch: int = 0, first_sample: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """The `key` of one micro-step; `first_sample` counts within the global micro-batch."""
    numbers = torch.tensor([mix64(seed), mix64(step << 20 | micro_batch), first_sample])
    if torch.device(device).type == "cuda":  # from pinned memory the host need not wait for the copy
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _random_bits(dtype: torch.dtype) -> int:
    """How many random bits a number of this dtype holds without rounding (32 at most)."""
    return min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))


def bernoulli(
    key: Tensor, op: int, shape: Sequence[int], dtype: torch.dtype, p: float, **placement: Any
) -> Tensor:
    """1 with probability p, else 0."""
    threshold = round(p * 2**32) - 2**31
    if threshold >= 2**31:
        return torch.ones(shape, dtype=dtype, device=key.device)

    def finish(x: Tensor, out: Tensor) -> None:
        torch.lt(x, threshold, out=out)

    return generate(key, op, shape, dtype, finish, **placement)


def uniform(
    key: Tensor, op: int, shape: Sequence[int], dtype: torch.dtype, low: float, high: float, **placement: Any
) -> Tensor:
    """Uniform in [low, high), on a grid of 2**24 numbers in float32 (2**32 in float64)."""
    bits = _random_bits(dtype)

    def finish(x: Tensor, out: Tensor) -> None:
        # Each step up to [0, 1) is exact in dtype.
        out.copy_(x.bitwise_right_shift_(32 - bits)).mul_(2.0**-bits).add_(0.5)
        if (low, high) != (0.0, 1.0):
            out.mul_(high - low).add_(low)

    return generate(key, op, shape, dtype, finish, **placement)


def normal(
    key: Tensor, op: int, shape: Sequence[int], dtype: torch.dtype, mean: float, std: float, **placement: Any
) -> Tensor:
    """Normal, by the inverse distribution function of a uniform number symmetric around 0."""
    working = torch.float64 if dtype == torch.float64 else torch.float32
    bits = _random_bits(working)

    def finish(x: Tensor, out: Tensor) -> None:
        centred = x.bitwise_right_shift_(32 - bits).to(working)
        centred.mul_(2.0 ** (1 - bits)).add_(2.0**-bits)
        out.copy_(centred.erfinv_().mul_(std * math.sqrt(2)).add_(mean))

    return generate(key, op, shape, dtype, finish, **placement)


def randint(
    key: Tensor, op: int, shape: Sequence[int], dtype: torch.dtype, low: int, high: int, **placement: Any
) -> Tensor:
    """Integers in [low, high); the range may be up to 2**31 wide."""
    if not 0 < high - low <= RANGE_LIMIT:
        raise ValueError(f"randint needs 1 to {RANGE_LIMIT} values; [{low}, {high}) has {high - low}.")

    def finish(x: Tensor, out: Tensor) -> None:
        out.copy_(x.to(torch.int64).add_(2**31).mul_(high - low).bitwise_right_shift_(32).add_(low))

    return generate(key, op, shape, dtype, finish, **placement)


_PLACEMENT = "*, SymInt[] full=[], SymInt[] start=[], int batch_dim=-1, SymInt rows_per_sample=1"
_FAMILY: Mapping[str, tuple[str, Callable[..., Tensor]]] = MappingProxyType(
    {
        "bernoulli": ("float p", bernoulli),
        "uniform": ("float low, float high", uniform),
        "normal": ("float mean, float std", normal),
        "randint": ("SymInt low, SymInt high", randint),
    }
)


def _fake(key: Tensor, op: int, shape: Sequence[int], dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    return key.new_empty(shape, dtype=dtype)


def _register() -> Mapping[Any, Callable[..., Tensor]]:
    for name, (parameters, function) in _FAMILY.items():
        if not hasattr(torch.ops.plait, name):
            common = "Tensor key, int op, SymInt[] shape, ScalarType dtype"
            schema = f"({common}, {parameters}, {_PLACEMENT}) -> Tensor"
            torch.library.define(f"plait::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
            torch.library.impl(f"plait::{name}", ("cpu", "cuda"), function)
            torch.library.register_fake(f"plait::{name}", _fake)
    return MappingProxyType(
        {getattr(torch.ops.plait, name).default: entry[1] for name, entry in _FAMILY.items()}
    )


IMPLEMENTATIONS: Mapping[Any, Callable[..., Tensor]] = _register()
"""Each op's function on real tensors, for calls that bypass the dispatcher."""
