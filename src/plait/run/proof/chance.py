"""Whether numbers are distributed as others are, and independent of each other.

In: numbers of ours, as many of torch's. Out: findings: how far off something is, and the least that would be told.
Thresholds are multiples of the standard deviation that chance alone has, so that a false alarm is out of the question
(1e-12) where sums of so many numbers are normal, and everything beyond is found: that is the power of the test.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SIGMAS = 7.0
"""Of a mean: chance alone exceeds it once in 4e11 times."""
_SIGMAS_OF_MANY = 8.0
"""Of the largest of up to a million correlations: once in 1e9 times."""
_FEW_VALUES = 64
"""Distinct values, at most, of numbers that are compared value by value."""
_EXACT = 1e-6
"""Of a value: as float32 is rounded, ten times."""
_RARE = 100.0
"""How many joint events of the rare kind must be expected before a correlation is taken for normal."""
_SAMPLES, _POSITIONS = 64, 256
"""Samples, and positions in one, of which every pair is looked at; others are taken together, by their distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One comparison."""

    what: str
    largest: float
    """How far off it is: a share of the root mean square, or a correlation."""
    least: float
    """What would have been told."""


def kurtosis(numbers: Tensor) -> float:
    """The mean fourth power over the squared variance: about 1 / p of what happens with a small probability p."""
    centred = numbers - numbers.mean()
    variance = float(centred.square().mean())
    return float(centred.pow(4).mean()) / variance**2 if variance > 0 else 1.0


def enough(heavy: float) -> float:
    """Numbers in which correlations of what is up to half of them apart can be told from chance."""
    return 2 * _RARE * heavy**2 + 2


def distribution(ours: Tensor, theirs: Tensor) -> Iterator[Finding]:
    """Means, zeros, values: of two flat tensors of float64 of one size."""
    count = ours.numel()
    scale = max(float(theirs.square().mean().sqrt()), 1e-300)
    zeros = [(of == 0).double() for of in (ours, theirs)]
    parts = [("mean", ours, theirs, scale), ("mean square", ours.square(), theirs.square(), scale**2)]
    if any(bool(of.any()) for of in zeros):
        parts.append(("share of zeros", zeros[0], zeros[1], 1.0))
    for what, one, other, unit in parts:
        error = math.sqrt((float(one.var()) + float(other.var())) / count)
        # identical constants: what is left is rounding
        yield Finding(
            what=what,
            largest=abs(float(one.mean() - other.mean())) / unit,
            least=SIGMAS * error / unit + _EXACT,
        )
    values = [torch.unique(of) for of in (ours, theirs)]
    if len(values[1]) <= _FEW_VALUES:
        off = (values[0][:, None] - values[1][None, :]).abs().min(1).values.max()
        yield Finding(what="values", largest=float(off) / scale, least=_EXACT)
    else:
        yield Finding(what="distribution", largest=_apart(ours, theirs), least=3.8 * math.sqrt(2 / count))


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Kolmogorov's and Smirnov's distance; `3.8 sqrt(2 / n)` is exceeded once in 1e12 times."""
    grid = torch.cat([ours, theirs]).sort().values
    shares = [torch.searchsorted(of.sort().values, grid, right=True) / of.numel() for of in (ours, theirs)]
    return float((shares[0] - shares[1]).abs().max())


def along(series: Tensor, heavy: float) -> Iterator[Finding]:
    """Correlations in draws [draw, sample, position] of one kind: at every distance, of samples, of positions.
    `heavy`: the kurtosis."""
    numbers = _standard(series)
    if numbers is None:
        return
    flat = numbers.reshape(-1)
    most = flat.numel() // 2
    if flat.numel() - most >= _RARE * heavy**2:
        turned = torch.fft.rfft(flat, 2 * flat.numel())
        sums = torch.fft.irfft(turned * turned.conj(), 2 * flat.numel())[1 : most + 1]
        pairs = flat.numel() - torch.arange(1, most + 1)
        scores = (sums / pairs.sqrt()).abs()
        at = int(scores.argmax())
        yield Finding(
            what=f"numbers {at + 1} apart", largest=float(sums[at].abs() / pairs[at]),
            least=_SIGMAS_OF_MANY / math.sqrt(int(pairs[at])),
        )  # fmt: skip
    for what, rows in (
        ("samples", numbers[:, :_SAMPLES].transpose(0, 1).flatten(1)),
        ("positions", numbers[:, :, :_POSITIONS].permute(2, 0, 1).flatten(1)),
    ):
        pairs_ = rows.shape[1]
        if len(rows) > 1 and pairs_ >= _RARE * heavy**2:
            found = (rows @ rows.T / pairs_).fill_diagonal_(0.0).abs()
            one, other = divmod(int(found.argmax()), len(rows))
            yield Finding(
                what=f"{what} {one} and {other}",
                largest=float(found.max()),
                least=_SIGMAS_OF_MANY / math.sqrt(pairs_),
            )


def between(one: Tensor, other: Tensor, heavy: float) -> Finding | None:
    """The correlation of two draws' numbers [draw, sample, position]; `heavy`: that of both, multiplied."""
    common = tuple(slice(0, min(a, b)) for a, b in zip(one.shape, other.shape, strict=True))
    ours, theirs = _standard(one), _standard(other)
    if ours is None or theirs is None:
        return None
    left, right = ours[common].reshape(-1), theirs[common].reshape(-1)
    if left.numel() < _RARE * heavy:
        return None
    return Finding(
        what="",
        largest=abs(float(left @ right)) / left.numel(),
        least=_SIGMAS_OF_MANY / math.sqrt(left.numel()),
    )


def _standard(numbers: Tensor) -> Tensor | None:
    """With mean 0 and variance 1; None: they are all one."""
    deviation = float(numbers.std())
    return (numbers - numbers.mean()) / deviation if deviation > 0 else None
