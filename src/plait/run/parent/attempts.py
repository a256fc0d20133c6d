"""A run as a sequence of starts of its ranks: after a spoiled step, and after the loss of ranks, it goes on.

In: a task and its programs. Out: the summary of all starts together, and the programs of the last one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from plait.errors import LostError, SpoiledError
from plait.run.loop.task import Task
from plait.run.parent.again import Again
from plait.run.parent.outlive import Outlive
from plait.run.parent.parent import run_all
from plait.run.parent.ranks import run_ranks
from plait.run.prepare.programs import Programs
from plait.run.start.guardian import Guardian
from plait.run.start.tasks.first import First

_RETURNED = "hosts came back"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """What is done about each way in which ranks can end too soon."""

    again: Again
    outlive: Outlive | None
    """None: a loss of ranks ends the run."""
    guardian: Guardian
    party: First | None
    wants_end: Callable[[], str | None]

    def run(self, task: Task, programs: Programs, start_step: int) -> tuple[dict[str, Any], Programs]:
        """Start ranks until they come to an end that stays."""
        party, outlive, again = self.party, self.outlive, self.again
        tell = outlive.hear if outlive is not None else again.tell
        began = task.attempt
        while True:
            try:
                summary = run_all(
                    task, programs, tell, partial(run_ranks, self.guardian, party), self._wants_end
                )
            except SpoiledError as error:
                task = again.task_after(task, error)
                continue
            except LostError as error:
                if outlive is None:
                    raise error.cause from error
                left = (
                    party.members.lose(task.plan.ranks, error.lost)
                    if party is not None
                    else task.plan.ranks - len(error.lost)
                )
                task, programs = outlive.after_loss(task, programs, error, left)
                outlive.write(task.folder)
                if party is not None:
                    party.members.spread(task.plan.ranks)
                continue
            if summary["stopped"] == _RETURNED and outlive is not None and party is not None:
                what = f"{_RETURNED}: {party.members.take_in()}."
                ranks = min(party.members.ranks_left, outlive.most)
                task, programs = outlive.change(task, programs, ranks, what, None, time.monotonic())
                party.members.spread(task.plan.ranks)
                continue
            if outlive is not None:
                outlive.write(task.folder)
            if again.spoiled or task.attempt > began:
                summary["losses"] = again.losses(task.folder, start_step)
            return summary, programs

    def _wants_end(self) -> str | None:
        returned = self.outlive is not None and self.party is not None and self.party.has_returned
        return self.wants_end() or (_RETURNED if returned else None)
