"""What has been tried, and what is to be run next.

In: outcomes, as they come; they are appended to results.jsonl, and read from there when a try goes on. Out: the next
run, or None. A trial is run on every fold; in a search that stops losers it is first run on a part of its steps (a
rung), and goes on from there where it is among the best third of those that have come as far: asynchronous successive
halving (Li et al., 2020).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from plait.api.trials.space import Propose
from plait.errors import UsageError
from plait.files.document import Document, Format
from plait.files.records import RecordFile, Records, read_records
from plait.files.shape import shaped

REDUCTION = 3
"""Of so many trials that have come to a rung one goes on."""


class Key(NamedTuple):
    """One run of a try."""

    trial: int
    rung: int
    fold: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run ended."""

    score: float | None = None
    """What is compared; None: it failed."""
    steps: int = 0
    """How far it came."""
    seconds: float = 0.0
    """How long it took."""
    failed: str | None = None
    """Why."""


class _Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of results.jsonl: what a trial is given."""

    trial: int
    args: dict[str, Any]


class _Ended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of how a run of it ended."""

    trial: int
    rung: int
    fold: int
    score: float | None
    steps: int
    seconds: float
    failed: str | None


_FORMAT = Format(
    noun="a record of a try",
    error=UsageError,
    fix="remove that line: what it told of is run again; or choose another --out.",
)
_ALIKE = 3
"""Trials that fail for one reason, whatever their arguments, before no more are run."""


class Board:
    """Trials and outcomes of one try."""

    def __init__(
        self,
        path: Path,
        *,
        folds: int,
        rungs: int,
        mode: str,
        propose: Propose,
        varied: Collection[str] = (),
    ) -> None:
        """`varied`: arguments that have more than one value."""
        self._varied = varied
        self.args: dict[int, dict[str, Any]] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self.running: set[Key] = set()
        self._begun: set[tuple[int, int]] = set()
        self._folds = folds
        self._top = rungs - 1
        self._sign = 1.0 if mode == "min" else -1.0
        self._propose = propose
        if path.exists():
            self._recall(read_records(path), path)
        self._file = RecordFile(path, keep=lambda entry: True)

    def _recall(self, records: Records, path: Path) -> None:
        for number, entry in zip(records.numbers, records.entries, strict=True):
            document = Document(values=entry, where=f"{path}, line {number}")
            if "args" in entry:
                begun = shaped(document, _Trial, _FORMAT)
                self._begin(begun.trial, begun.args)
                continue
            ended = shaped(document, _Ended, _FORMAT)
            key = Key(ended.trial, ended.rung, ended.fold)
            self._begun.add(key[:2])
            if ended.failed is None:  # what failed is tried again
                self.outcomes[key] = Outcome(score=ended.score, steps=ended.steps, seconds=ended.seconds)

    def _begin(self, trial: int, args: dict[str, Any]) -> None:
        self.args[trial] = args
        self._begun.add((trial, 0))

    def take(self, key: Key, outcome: Outcome) -> None:
        """A run has ended."""
        self.running.discard(key)
        self.outcomes[key] = outcome
        self._write({**key._asdict(), **{name: getattr(outcome, name) for name in Outcome.__slots__}})

    def close(self) -> None:
        """Nothing comes any more."""
        self._file.close()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(entry)
        self._file.flush()

    def next(self) -> Key | None:
        """The run to start now; it counts as running from here on. None: there is none before another has ended."""
        if self.hopeless is not None:
            return None
        key = self._unfinished()
        if key is None and self._promote(at_last=False):
            key = self._unfinished()
        if key is None and self._add_trial():
            key = self._unfinished()
        if key is None and not self.running and self._promote(at_last=True):
            key = self._unfinished()
        if key is not None:
            self.running.add(key)
        return key

    @property
    def hopeless(self) -> str | None:
        """Why all have failed, for one reason and with all kinds of arguments: others would too."""
        reasons = {outcome.failed for outcome in self.outcomes.values()}
        trials = {key.trial for key in self.outcomes}
        if len(reasons) != 1 or len(trials) < _ALIKE:
            return None
        for name in self._varied:
            if len({str(self.args[trial][name]) for trial in trials}) == 1:
                return None
        return reasons.pop()

    def _unfinished(self) -> Key | None:
        for trial, rung in sorted(self._begun, key=lambda begun: (-begun[1], begun[0])):
            if self._failed(trial, rung) is not None:
                continue
            keys = [Key(trial, rung, fold) for fold in range(self._folds)]
            waiting = [key for key in keys if key not in self.outcomes and key not in self.running]
            if waiting:
                return waiting[0]
        return None

    def _add_trial(self) -> bool:
        trial = len(self.args)
        finished = {number: self.mean(number, self._top) for number in self.args}
        scores = {number: score for number, score in finished.items() if score is not None}
        args = self._propose(trial, scores, self.args)
        if args is None:
            return False
        self._begin(trial, args)
        self._write({"trial": trial, "args": args})
        return True

    def _promote(self, *, at_last: bool) -> bool:
        """Let one more of the best of a rung go on, of the highest rung where there is one.

        `at_last`: nothing else is left to do, so the best goes on however few there are: somebody has to finish.
        """
        for rung in reversed(range(self._top)):
            scores = {trial: self.mean(trial, rung) for trial in self.args}
            done = {trial: score for trial, score in scores.items() if score is not None}
            best = sorted(done, key=lambda trial: (self._sign * done[trial], trial))
            waiting = [trial for trial in best if (trial, rung + 1) not in self._begun]
            chosen = [trial for trial in best[: len(done) // REDUCTION] if trial in waiting]
            if at_last and not any(
                above == rung + 1 and not self._failed(t, above) for t, above in self._begun
            ):
                chosen = waiting
            if chosen:
                self._begun.add((chosen[0], rung + 1))
                return True
        return False

    def _failed(self, trial: int, rung: int) -> str | None:
        keys = [Key(trial, rung, fold) for fold in range(self._folds)]
        return next(
            (why for key in keys if key in self.outcomes and (why := self.outcomes[key].failed)), None
        )

    def failed(self, trial: int) -> str | None:
        """Why it did, where it did."""
        return self._failed(trial, self.rung(trial))

    def scores(self, trial: int, rung: int) -> list[float]:
        """Of the folds that are finished."""
        keys = [Key(trial, rung, fold) for fold in range(self._folds)]
        outcomes = [self.outcomes[key] for key in keys if key in self.outcomes]
        return [outcome.score for outcome in outcomes if outcome.score is not None]

    def mean(self, trial: int, rung: int) -> float | None:
        """Over the folds; None where they are not all there."""
        scores = self.scores(trial, rung)
        return fmean(scores) if len(scores) == self._folds else None

    def rung(self, trial: int) -> int:
        """The highest that it has begun."""
        return max(rung for begun, rung in self._begun if begun == trial)
