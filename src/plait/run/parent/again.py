"""What is done about a spoiled run: it goes on from the last good checkpoint, in fresh processes, or ends.

In: the task of the ranks that ended with a `SpoiledError`. Out: the task to start them with again; or the error, where
the user wants it so, the same step is spoiled twice, or there is nothing to go back to. Checkpoints are good: weights
are compared before each save, and a bad loss is seen before the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.errors import CheckpointError, SpoiledError, UsageError
from plait.files.records import read_records
from plait.options import Listener, OnBadLoss
from plait.plan.plan import Plan
from plait.run.checkpoint.store import locate_checkpoint
from plait.run.loop.task import Task

_MOST = 5
"""Times that one run goes back: more often, and the host is not fit to be used."""


def check_bad_loss(policy: OnBadLoss, plan: Plan) -> None:
    """Refuse to go back where a checkpoint may hold what a bad loss has spoiled: others save before it is seen."""
    if policy != "stop" and not plan.agreement.marches:
        raise UsageError(
            f"--on-bad-loss {policy}: under {plan.name} workers do not march in step, so the last checkpoint may be"
            " spoiled when a bad loss is seen.",
            fix="leave it at stop, and --resume from a checkpoint that you trust; or use a plan that marches in step.",
        )


@dataclass(kw_only=True, slots=True)
class Again:
    """Remembers what was spoiled before."""

    on_bad_loss: OnBadLoss
    tell: Listener
    spoiled: list[int] = field(default_factory=list)
    """Steps, in the order in which they were found."""

    def task_after(self, task: Task, error: SpoiledError) -> Task:
        """How to go on; or `error` again."""
        stops = not task.plan.agreement.marches or (error.cause == "loss" and self.on_bad_loss == "stop")
        if stops or error.step in self.spoiled or len(self.spoiled) >= _MOST:
            raise error
        try:
            checkpoint = locate_checkpoint(task.folder, on_notice=lambda text: self.tell({"notice": text}))
        except CheckpointError:
            fix = f"{error.fix} There is no checkpoint to go back to: use --checkpoint-every."
            raise SpoiledError(error.what, step=error.step, cause=error.cause, fix=fix) from error
        self.spoiled.append(error.step)
        leaves_out = error.cause == "loss" and self.on_bad_loss == "skip"
        self.tell(
            {
                "notice": f"{error.what} The run goes back to {checkpoint.name}"
                + (f" and leaves out step {error.step + 1}." if leaves_out else ".")
            }
        )
        for name in ("failure.txt", *(path.name for path in task.folder.glob("failed-rank-*.txt"))):
            (task.folder / name).unlink(missing_ok=True)
        leave_out = task.leave_out | ({error.step} if leaves_out else frozenset())
        return replace(task, resume=checkpoint, leave_out=leave_out)

    def losses(self, folder: Path, start_step: int) -> list[float]:
        """Of every step of this run, also those before it went back: from its records, where each step stands once."""
        entries = read_records(folder / "metrics.jsonl").entries
        return [entry["loss"] for entry in entries if "loss" in entry and _step(entry) >= start_step]


def _step(entry: Mapping[str, object]) -> int:
    step = entry.get("step")
    return step if isinstance(step, int) else -1
