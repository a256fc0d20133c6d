"""Parameters that are not trained for a while.

Goes in: a job's `freeze`. Comes out: whether a parameter is frozen in a step. As with `requires_grad=False` in a loop
of one's own: it has no gradient then, so no norm counts it, and no optimizer decays it or begins to keep state for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from plait.errors import JobError
from plait.job.fields import Problem, is_whole
from plait.job.updates.patterns import as_patterns, first_of, is_patterns


@dataclass(frozen=True, kw_only=True, slots=True)
class Freeze:
    """Some parameters, and when they are frozen."""

    parameters: str | Sequence[str]
    """Names, modules or wildcards: `backbone`, `*.bias`."""
    first: int = 0
    """The first step (or epoch) in which they are frozen."""
    until: int | None = None
    """The first one in which they are trained again; None: never."""
    unit: Literal["step", "epoch"] = "step"
    """What `first` and `until` count, from 0."""

    def __post_init__(self) -> None:
        problems = freeze_problems(self)
        if problems:
            raise JobError(
                " ".join(f"freeze: {p.what}" for p in problems), fix=" ".join(p.fix for p in problems)
            )

    def in_steps(self, first_step: Callable[[int], int] | None) -> "Freeze":
        """The same, counted in steps; `first_step` of an epoch, None of a stream."""
        if self.unit == "step":
            return self
        if first_step is None:
            raise JobError(
                "freeze counts epochs, and the data is a stream: nobody knows in which step its epochs end.",
                fix="count steps: unit='step'.",
            )
        until = None if self.until is None else first_step(self.until)
        return replace(self, first=first_step(self.first), until=until, unit="step")

    def holds(self, name: str, step: int) -> bool:
        """Whether it freezes a parameter in a step."""
        assert self.unit == "step", "epochs are counted in steps once the data is known"
        now = self.first <= step and (self.until is None or step < self.until)
        return now and self.names(name)

    def names(self, name: str) -> bool:
        """Whether a parameter is one of them."""
        return first_of(as_patterns(self.parameters), name) is not None


def freeze_problems(freeze: Freeze) -> list[Problem]:
    """Everything wrong with it by itself."""
    found = []
    if not is_patterns(freeze.parameters):
        found.append(
            Problem(what=f"parameters is {freeze.parameters!r}.", fix="name some: parameters='backbone'.")
        )
    if not is_whole(freeze.first) or freeze.first < 0:
        found.append(Problem(what=f"first is {freeze.first!r}.", fix="give first a whole number >= 0."))
    elif freeze.until is not None and not (is_whole(freeze.until) and freeze.until > freeze.first):
        found.append(
            Problem(
                what=f"until is {freeze.until!r}.", fix=f"give until a whole number above {freeze.first}."
            )
        )
    if freeze.unit not in ("step", "epoch"):
        found.append(Problem(what=f"unit is {freeze.unit!r}.", fix="use unit='step' or unit='epoch'."))
    return found
