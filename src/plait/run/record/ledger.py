"""Who writes the journal: what is told of a run becomes one line a step, under every plan.

In: what workers tell, each of its own share of a step; where they march, rank 0 of all shares at once. Out: the run's
journal, a line once all shares of a step are done; and losses. It is where the run cannot do without: in rank 0 where
workers march, else in the parent, for any worker may die. What such a worker took along is named in its step's line.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from plait.files.records import read_records
from plait.job.job import Until
from plait.job.order import SampleOrder
from plait.run.record.evaluate import Progress
from plait.run.record.journal import Journal
from plait.run.record.shares import Event, drop_shares, left_shares

_RATE_STEPS = 10
"""Steps over which the rate is told."""
_NAMED = 8
"""Steps that a sentence names."""


class Ledger:
    """Puts together what workers tell."""

    def __init__(
        self,
        journal: Journal,
        shares: int,
        until: Until | None,
        progress: dict[str, Any],
        order: SampleOrder | None = None,
    ) -> None:
        """`order`: of the samples, to name those that are lost; None: of a stream, where shares have no ids before."""
        self._journal = journal
        self._order = order
        self.lost: dict[int, tuple[int, ...]] = {}
        """Shares of steps that nobody has done or will do."""
        self._shares = shares
        self._living = set(range(shares))
        """Shares that somebody still does."""
        self._progress = Progress(until)
        self._progress.load(progress)
        self._open: dict[int, list[dict[str, Any]]] = {}
        self._completed_s = time.monotonic()
        self._latest: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        """(when it ended, samples) of the last steps."""
        self.losses: dict[int, float] = {}
        """By step."""
        self.evaluation: dict[str, float] = {}
        """The last one."""
        self.tickets: dict[int, int] = {}
        """Shares done, by worker."""
        self.num_updates = 0
        """Shares that had samples: where nobody else counts, each was an update."""
        self.stopped: str | None = None
        self.trained = False
        """Whether shares that nobody told of were trained on all the same."""

    def resume_at(self, now_s: float) -> None:
        """Time is counted from here."""
        self._completed_s = now_s

    def take_share(self, rank: int, share: dict[str, Any]) -> None:
        """A worker has done its share of a step."""
        self.tickets[rank] = self.tickets.get(rank, 0) + 1
        self.num_updates += bool(share["samples"])
        step = int(share["step"])
        done = self._open.setdefault(step, [])
        done.append(share)
        if self._is_complete(step):
            self._write(step, self._open.pop(step))

    def lose_share(self, share: int) -> None:
        """Nobody does this share any more: steps are complete without it."""
        self._living.discard(share)
        for step in [step for step in sorted(self._open) if self._is_complete(step)]:
            self._write(step, self._open.pop(step))

    def _is_complete(self, step: int) -> bool:
        return self._living <= {int(share["share"]) for share in self._open[step]}

    def take_evaluation(self, told: dict[str, Any]) -> bool:
        """A worker has measured the weights of the moment; whether training has reached its goal."""
        self.write_evaluation(told)
        if self.stopped is None:
            self.stopped = self._progress.reached(told["evaluate"])
        return self.stopped is not None

    def write_evaluation(self, told: dict[str, Any]) -> None:
        """Write down measurements that decide nothing any more."""
        self.evaluation = told["evaluate"]
        self._journal.write_evaluation(told)

    def in_order(self) -> list[float]:
        """The losses of all steps."""
        return [self.losses[step] for step in sorted(self.losses)]

    def flush(self) -> None:
        """Hand all that is written to the system, so that it outlives this process."""
        self._journal.flush()

    def close(self, steps: Iterable[int] = ()) -> None:
        """The run is over: what is missing of the steps that were begun, and of `steps`, is lost."""
        for step in sorted({*self._open, *steps}):
            self._write(step, self._open.pop(step, []))
        self._journal.say_newest()

    def leave(self) -> None:
        """The run has failed: steps that were begun stay in the file of shares, for whoever resumes it."""
        self._journal.say_newest()

    def gaps(self, start: int) -> list[int]:
        """Steps of which nobody has told anything, though later ones are done."""
        known = {*self.losses, *self.lost, *self._open}
        return sorted(set(range(start, max(known, default=start))) - known)

    def told_losses(self) -> str | None:
        """A sentence on what was lost; None: nothing was."""
        if not self.lost:
            return None
        steps, count = sorted(step + 1 for step in self.lost), sum(map(len, self.lost.values()))
        more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
        return (
            f"{count} share(s) of step(s) {', '.join(map(str, steps[:_NAMED]))}{more} were not trained on: the workers"
            " that held them have died. Their samples are named as `lost` in samples.jsonl, where samples are recorded."
        )

    def _write(self, step: int, done: Sequence[dict[str, Any]]) -> None:
        missing = tuple(sorted(set(range(self._shares)) - {int(share["share"]) for share in done}))
        lost: list[int] = []
        by_share = self._order.of_shares(step, self._shares) if missing and self._order is not None else None
        if missing and not self.trained:
            self.lost[step] = missing
            lost = [number for share in missing for number in by_share[share]] if by_share is not None else []
        weight = sum(share["weight"] for share in done)
        if not weight:
            if lost:
                assert self._order is not None
                self._journal.write_samples(step, self._order.at(step).epoch, [], lost)
            return
        self.losses[step] = sum(share["total"] for share in done) / weight
        ended_s = max(share["ended_s"] for share in done)
        step_s = max(0.0, ended_s - self._completed_s)  # several may be done at one moment
        self._completed_s = max(self._completed_s, ended_s)
        samples = sum(share["samples"] for share in done)
        rate = self._rate(ended_s, step_s, samples)
        if self._shares == 1:  # that of one is told with it, without what came between
            step_s = done[0]["step_s"]
            rate = samples / max(step_s, 1e-6)
        entry = {
            "step": step,
            "epoch": done[0]["epoch"],
            "loss": self.losses[step],
            "lr": done[-1]["lr"],
            "samples": samples,
            "samples_per_s": rate,
            "step_s": step_s,
            **({} if done[0].get("grad_norm") is None else {"grad_norm": done[0]["grad_norm"]}),
            "memory_bytes": max(share["memory_bytes"] for share in done),
            **({"ends_epoch": True} if any(share.get("ends_epoch") for share in done) else {}),
            **({"lost_shares": list(missing)} if missing and not self.trained else {}),
        }
        in_order = sorted(done, key=lambda share: int(share["share"]))
        ids = [number for share in in_order for number in share.get("ids", ())]
        if self.trained and by_share is not None:
            ids = [number for share in by_share for number in share]
        self._journal.write_step(entry, torch.tensor(ids, dtype=torch.int64), lost)

    def _rate(self, ended_s: float, step_s: float, samples: int) -> float:
        """Samples a second over the last steps."""
        self._latest.append((ended_s, samples))
        times = [at_s for at_s, _ in self._latest]
        spent_s = max(times) - min(times)
        if len(times) < 2 or spent_s <= 0:
            return samples / max(step_s, 1e-6)
        return sum(count for _, count in list(self._latest)[1:]) / spent_s


def write_left_shares(
    folder: Path,
    below: int,
    *,
    samples: bool,
    order: SampleOrder | None = None,
    tell: Callable[[str], None] = lambda text: None,
    trained: bool = False,
) -> list[int]:
    """Write down what a parent that was killed had not, of steps below the one with which its run goes on; which.

    Shares of such steps that nobody has done are lost, and `tell` is told; `trained`: the weights say that all were
    done, by workers that had no time left to tell. Nothing of it is left afterwards: a run that starts anew does not
    find the shares of another.
    """
    events = left_shares(folder)
    if not any(_is_below(event, below) for event in events):
        drop_shares(folder)
        return []
    lines = read_records(folder / "metrics.jsonl").entries if (folder / "metrics.jsonl").exists() else ()
    written = {(entry.get("step"), "evaluate" in entry) for entry in lines}
    anew = _half_written(
        folder, {share.step for event in events if (share := event.share) is not None}, samples
    )
    written -= {(step, False) for step in anew}
    with Journal(folder, lambda event: None, keep_below=below, samples=samples, anew=anew) as journal:
        shares = [event.share for event in events if event.share is not None]
        ledger = Ledger(journal, 1 + max((share.share for share in shares), default=0), None, {}, order)
        ledger.trained = trained
        ledger.resume_at(min((share.ended_s for share in shares), default=0.0))
        for event in events:
            share, measured = event.share, event.evaluated
            if not _is_below(event, below):
                continue
            if share is not None and (share.step, False) not in written:
                ledger.take_share(event.rank, msgspec.structs.asdict(share))
            if measured and (measured["step"], True) not in written:
                ledger.write_evaluation(measured)
        steps = {step for step, is_evaluation in written if not is_evaluation}
        first = min((share.step for share in shares), default=below)
        ledger.close(step for step in range(first, below) if step not in steps | ledger.losses.keys())
        if (lost := ledger.told_losses()) is not None:
            tell(lost)
    drop_shares(folder)
    return sorted(ledger.losses)


def _half_written(folder: Path, steps: set[int], samples: bool) -> set[int]:
    """Of these steps, those that are in one file of the journal and not in the other: each is flushed by itself."""
    if not samples:
        return set()
    found = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        entries = read_records(folder / name).entries if (folder / name).exists() else ()
        found.append({entry.get("step") for entry in entries if "evaluate" not in entry})
    return steps & (found[0] ^ found[1])


def _is_below(event: Event, step: int) -> bool:
    number = event.share.step if event.share is not None else (event.evaluated or {}).get("step")
    return isinstance(number, int) and number < step
