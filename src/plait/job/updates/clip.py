"""How gradients are bounded before an update.

Goes in: a job's `clip_norm` and `clip_value`, each one number or one for each pattern. Comes out: which bound is meant
for a parameter. Never touches a gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.job.updates.patterns import first_of

Bound = float | Mapping[str, float] | None
"""One number for all parameters together, or one for the parameters of each pattern."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Norms first, then values. A parameter is bounded by the first pattern that means it, or not at all."""

    norms: tuple[tuple[str, float], ...] = ()
    """(pattern, largest norm of the gradients of its parameters together)."""
    values: tuple[tuple[str, float], ...] = ()
    """(pattern, largest absolute value)."""

    @classmethod
    def of(cls, norm: Bound = None, value: Bound = None) -> "Clip":
        """What a job says."""
        return cls(norms=_pairs(norm), values=_pairs(value))

    def __bool__(self) -> bool:
        return bool(self.norms or self.values)

    def norm_of(self, name: str) -> int | None:
        """The position in `norms` of what bounds a parameter."""
        return first_of((pattern for pattern, _ in self.norms), name)

    def value_of(self, name: str) -> float | None:
        """The largest value of a parameter's gradient; None: any."""
        position = first_of((pattern for pattern, _ in self.values), name)
        return None if position is None else self.values[position][1]


def _pairs(bound: Bound) -> tuple[tuple[str, float], ...]:
    if bound is None:
        return ()
    if isinstance(bound, Mapping):
        return tuple((pattern, float(value)) for pattern, value in bound.items())
    return (("*", float(bound)),)
