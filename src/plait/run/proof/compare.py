"""How far two runs are apart, tensor by tensor.

In: two records, how closely they must agree. Out: differences in the order of computation. Infinities at the same
places are equal, and so is NaN where both sides have it: a causal mask holds -inf by design. Where one side alone has
them, the difference is infinite; it is never NaN.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.run.hold.away.copies import distance
from plait.run.proof.serial_run import Record

FP32 = 1e-5
"""Floor of a gradient in float32: a share of the norm of all of them."""
FP32_FLOOR = 1e-4
"""Floor of weights and buffers in float32, likewise."""
_FLOAT64_FLOOR = 1e-3
"""Times the tolerance of 1e-9: 1e-12 of the norm of all tensors."""
_NOISES = 5
"""Times what rounding does to one of two runs: both are rounded, and each in its own order."""
_LATER = 100
"""In float32, AdamW has amplified the rounding of the first step from the second on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest difference of one kind."""

    kind: str
    """loss, gradient, norm, weight, buffer, spread."""
    name: str
    """The tensor, with its step."""
    largest: float
    """Relative to the tensor's largest value, or to the floor; infinite where the two cannot be compared."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance."""
        return self.largest <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Of tensors by name, how far rounding alone takes them, as a share of their largest value."""

    gradients: Mapping[str, float] = field(default_factory=dict)
    """Of the first step."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """After the last one: an optimizer may make steps of full length of gradients that are noise."""


_QUIET = Noise()


def noise_of(record: Record, exact: Record) -> Noise:
    """From the same run with less rounding; where either is not finite nothing is known."""
    pairs = ((record.gradients[0], exact.gradients[0], FP32), (record.weights, exact.weights, FP32_FLOOR))
    found = []
    for ours, theirs, share in pairs:
        floor = norm(theirs.values()) * share
        off = {name: relative(ours[name], theirs[name], floor) for name in ours.keys() & theirs.keys()}
        found.append({name: value for name, value in off.items() if math.isfinite(value)})
    return Noise(gradients=found[0], weights=found[1])


def compare(
    reference: Record,
    record: Record,
    *,
    rough: bool,
    tolerance: float,
    weight_tolerance: float,
    noise: Noise = _QUIET,
) -> list[Difference]:
    """Every tensor of two runs, in the order of computation; `rough`: not in float64 throughout."""
    found = []
    later = [tolerance * (_LATER if rough and step > 0 else 1) for step in range(len(reference.losses))]
    pairs = zip(reference.losses, record.losses, reference.gradients, record.gradients, strict=True)
    for step, (loss, other, ours, theirs) in enumerate(pairs):
        found.append(_number("loss", step, loss, other, later[step]))
        if not (rough and step > 0):
            floor = norm(ours.values()) * (FP32 if rough else _FLOAT64_FLOOR)
            noisy = noise.gradients if step == 0 else {}
            found += _tensors("gradient", f"at step {step + 1}", ours, theirs, floor, tolerance, noisy)
    if reference.norms is not None and record.norms is not None:
        # AdamW does not notice a gradient that was clipped too much
        for step, (ours_, theirs_) in enumerate(zip(reference.norms, record.norms, strict=True)):
            found.append(_number("norm", step, ours_, theirs_, later[step]))
    after = f"after {len(record.losses)} steps"
    share = FP32_FLOOR if rough else _FLOAT64_FLOOR
    for kind, ours, theirs in (
        ("weight", reference.weights, record.weights),
        ("buffer", reference.buffers, record.buffers),
    ):
        floor = norm(tensor for tensor in ours.values() if tensor.is_floating_point()) * share
        noisy = noise.weights if kind == "weight" else {}
        found += _tensors(kind, after, ours, theirs, floor, weight_tolerance, noisy)
    if record.spread is not None:
        found.append(
            Difference(kind="spread", name="weights between ranks", largest=record.spread, tolerance=0.0)
        )
    return found


def largest_by_kind(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Of each kind the one that fails, else the one that is furthest off."""
    best: dict[str, Difference] = {}
    for difference in found:
        known = best.get(difference.kind)
        if known is None or (not difference.ok, difference.largest) > (not known.ok, known.largest):
            best[difference.kind] = difference
    return tuple(best.values())


def relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Largest difference relative to the largest value; `floor` is the smallest value it is compared with."""
    difference = distance(ours, theirs)
    if difference in (0.0, math.inf):
        return difference
    largest = float(_finite(ours).abs().max())
    return difference / max(largest, floor, 1e-300)


def norm(tensors: Iterable[Tensor]) -> float:
    """Of all that is finite in them."""
    return math.sqrt(sum(float(_finite(tensor).square().sum()) for tensor in tensors))


def _finite(tensor: Tensor) -> Tensor:
    parts = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return torch.nan_to_num(parts.double(), nan=0.0, posinf=0.0, neginf=0.0)


def _tensors(
    kind: str,
    when: str,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    floor: float,
    tolerance: float,
    noise: Mapping[str, float],
) -> list[Difference]:
    """Of every name that either side has; one that the other has not is infinitely far off."""
    return [
        Difference(
            kind=kind,
            name=f"{name} {when}",
            largest=relative(ours[name], theirs[name], floor)
            if name in ours and name in theirs
            else math.inf,
            tolerance=max(tolerance, _NOISES * noise.get(name, 0.0)),
        )
        for name in dict.fromkeys([*ours, *theirs])
    ]


def _number(kind: str, step: int, ours: float, theirs: float, tolerance: float) -> Difference:
    one, other = (torch.tensor(value, dtype=torch.float64) for value in (ours, theirs))
    return Difference(
        kind=kind, name=f"step {step + 1}", largest=relative(one, other, 0.0), tolerance=tolerance
    )
