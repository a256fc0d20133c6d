"""Runs side by side, and predictions beside them.

In: run folders and predictions. Out: a `Comparison`, one row each; the first is what the others are held against.
"""

from dataclasses import dataclass
from pathlib import Path

from plait.errors import UsageError
from plait.report.record import read_run
from plait.report.summary import summarize
from plait.report.text import plan_name
from plait.search.predict.prediction import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A run, or a prediction of one; `None` where it does not say."""

    name: str
    """The run folder; of a prediction, its cluster."""
    is_predicted: bool
    plan: str | None
    ranks: int | None
    batch: int | None
    """Samples a step, over all ranks."""
    step_s: float | None
    samples_per_s: float | None
    memory_bytes: float | None
    """The most of a rank. Measured on processors it is that of the whole process."""
    num_steps: int | None = None
    """The last step that was logged."""
    final_loss: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Rows; the first is what the others are held against."""

    rows: tuple[Compared, ...]

    def speed(self, row: int) -> float | None:
        """How many times as many samples a second as the first."""
        first, own = self.rows[0].samples_per_s, self.rows[row].samples_per_s
        return own / first if first and own else None


def compare(*runs: str | Path | Prediction) -> Comparison:
    """Run folders, and predictions of what they did or might have done, side by side."""
    if not runs:
        raise UsageError("there is nothing to compare.", fix="give run folders, as plait run printed them.")
    return Comparison(rows=tuple(map(_compared, runs)))


def _compared(run: str | Path | Prediction) -> Compared:
    if isinstance(run, Prediction):
        return Compared(
            name=run.cluster.name, is_predicted=True, plan=run.plan.name, ranks=run.plan.ranks, batch=run.batch,
            step_s=run.step_s, samples_per_s=run.samples_per_s, memory_bytes=run.memory.total,
        )  # fmt: skip
    record = read_run(Path(run))
    summary, batch = summarize(record), _whole(record.environment.get("batch"))
    rate = summary.samples_per_s
    return Compared(
        name=str(run), is_predicted=False, plan=plan_name(record), ranks=_whole(record.environment.get("ranks")),
        batch=batch, step_s=batch / rate if batch and rate else None, samples_per_s=rate,
        memory_bytes=summary.peak_memory_bytes, num_steps=summary.num_steps, final_loss=summary.final_loss,
    )  # fmt: skip


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
