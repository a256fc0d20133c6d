"""The order of all candidates, found without predicting most of them.

In: candidates and an `Oracle` that knows bounds (cheap) and predictions (dearer). Out: a `Ranking`: the best plan of
every family that fits, in order of step time, and for every family that does not the reason. Candidates come in the
order of their bounds; the search ends when no bound is below what it has. At a time limit it keeps what it has and says
so.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plait.plan.mesh import Mesh
from plait.plan.plan import Plan
from plait.search.choose.candidates import RECOMPUTE, Candidate, Misfit
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds


class Oracle(Protocol):
    """Who knows what a candidate costs."""

    def least_s(self, candidate: Candidate) -> float:
        """No step of this candidate is shorter."""
        ...

    def least_bytes(self, candidate: Candidate) -> float:
        """No device needs less memory under this candidate."""
        ...

    def needs_bytes(self, candidate: Candidate) -> float:
        """Memory of a device that the candidate is expected to need."""
        ...

    def predict(self, candidate: Candidate) -> Prediction:
        """What the candidate is expected to cost, if its memory fits."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A family of plans that cannot be used."""

    plan: Plan | None
    """The one of them that needs least; None where the mesh itself does not do."""
    mesh: Mesh
    """Its ranks."""
    reason: str
    """Why: `needs 91 GiB of 80 GiB`."""
    needs_bytes: float = 0.0
    """Memory that it needs, where that is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """All families of plans, in order."""

    predictions: tuple[Prediction, ...]
    """The best of each family that fits: the choice, then the others, fastest first."""
    rejected: tuple[Rejected, ...]
    """Families that do not."""
    num_candidates: int
    """Plans that were considered."""
    num_predicted: int
    """Of these, how many bounds could not rule out."""
    seconds: float
    """Time of the search."""
    notices: tuple[str, ...] = ()
    """What a person should know: a time limit, axes that cannot be used."""
    relaxed: tuple[Prediction, ...] = ()
    """Plans whose workers do not sum gradients, which only a person can choose; in no order."""


@dataclass(slots=True)
class _Family:
    """What is known of one family so far."""

    best: Prediction | None = None
    least: tuple[float, Candidate] | None = None
    """Least memory that was predicted or bounded, of a candidate that does not fit."""
    predicted: bool = False
    is_open: bool = False
    """Whether some candidate was left out because it would be slower than what is shown."""
    failed: list[Candidate] = field(default_factory=list)
    """Candidates that do not fit, of which larger ones need not be tried."""


class PlanSearch:
    """One search, which can be given candidates in several goes."""

    def __init__(self, oracle: Oracle, *, limit_bytes: float, top: int, deadline: float) -> None:
        self.oracle, self.limit_bytes, self.top, self.deadline = oracle, limit_bytes, top, deadline
        self.began = time.perf_counter()
        self.families: dict[tuple[object, ...], _Family] = {}
        self.num_candidates = self.num_predicted = 0
        self.stopped = False

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Consider more candidates."""
        open_: list[tuple[float, Candidate]] = []
        for candidate in candidates:
            self.num_candidates += 1
            family = self.families.setdefault(candidate.family, _Family())
            least = self.oracle.least_bytes(candidate)
            if least > self.limit_bytes:
                if family.least is None or (not family.predicted and least < family.least[0]):
                    family.least = (least, candidate)
            else:
                open_.append((self.oracle.least_s(candidate), candidate))
        open_.sort(key=lambda entry: entry[0])
        for bound, candidate in open_:
            if self._is_late() or bound >= self._worst_shown():
                self.families[candidate.family].is_open = True
            else:
                self._try(bound, candidate)

    @property
    def misses(self) -> bool:
        """Whether some plans need more memory than there is."""
        return any(family.least is not None for family in self.families.values())

    def _is_late(self) -> bool:
        """Whether the time is up; never before there is a plan that fits."""
        if time.perf_counter() > self.deadline and any(f.best is not None for f in self.families.values()):
            self.stopped = True
        return self.stopped

    def _worst_shown(self) -> float:
        """The step time that a candidate must beat to be shown at all."""
        times = sorted(f.best.step_s for f in self.families.values() if f.best is not None)
        return times[self.top - 1] if len(times) >= self.top else float("inf")

    def _try(self, bound: float, candidate: Candidate) -> None:
        family = self.families[candidate.family]
        if family.best is not None and bound >= family.best.step_s:
            return
        if any(_needs_more(candidate, other) for other in family.failed):
            return
        self.num_predicted += 1
        needs = self.oracle.needs_bytes(candidate)
        if needs > self.limit_bytes:
            family.failed.append(candidate)
            if family.least is None or not family.predicted or needs < family.least[0]:
                family.least, family.predicted = (needs, candidate), True
            return
        prediction = self.oracle.predict(candidate)
        if family.best is None or prediction.step_s < family.best.step_s:
            family.best = prediction

    def ranking(self, misfits: Sequence[Misfit] = (), notices: Sequence[str] = ()) -> Ranking:
        """What was found."""
        taken = time.perf_counter() - self.began
        found = sorted(
            (f.best for f in self.families.values() if f.best is not None), key=lambda best: best.step_s
        )
        said = list(notices)
        if self.stopped:
            said.append(
                f"the search stopped at its time limit after {format_seconds(taken)} and {self.num_predicted} "
                "predictions: the first plan is valid and the best so far, a better one may exist."
            )
        return Ranking(
            predictions=tuple(found),
            rejected=(
                *self._rejected(),
                *(Rejected(plan=None, mesh=m.mesh, reason=m.reason) for m in misfits),
            ),
            num_candidates=self.num_candidates,
            num_predicted=self.num_predicted,
            seconds=taken,
            notices=tuple(said),
        )

    def _rejected(self) -> Iterable[Rejected]:
        for family in self.families.values():
            if family.best is None and family.least is not None and not family.is_open:
                needs, candidate = family.least
                least = "" if family.predicted else "at least "
                yield Rejected(
                    plan=candidate.plan,
                    mesh=candidate.plan.mesh,
                    reason=f"needs {least}{format_bytes(needs)} of {format_bytes(self.limit_bytes)}",
                    needs_bytes=needs,
                )


def _needs_more(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate needs no less memory than another of its family that did not fit."""
    mine, theirs = candidate.plan, other.plan
    again = [RECOMPUTE.index(str(plan.memory.recompute)) for plan in (mine, theirs)]
    same = mine.tensor == theirs.tensor and mine.memory.offload == theirs.memory.offload
    return same and candidate.micro_batch >= other.micro_batch and again[0] <= again[1]
