"""Checkpoints of a model that workers share, by the parent.

In: events of workers. Out: the shared model in checkpoints, on the way and at the end. The parent shares the workers'
memory, so no death of a worker loses anything but the share of a step that it was at.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from plait.errors import CheckpointError
from plait.options import Listener
from plait.run.checkpoint.saver import Saver
from plait.run.loop.shared_model import SharedModel
from plait.run.loop.task import Task
from plait.run.start.launch import Interrupted

OnEvent = Callable[[int, dict[str, Any]], bool]
StartRanks = Callable[[OnEvent, Collection[int]], list[Any]]
"""Runs all ranks, given who listens and which ranks the run can do without; returns what each returned."""


class ParentSaver:
    """Saves the shared model while workers run: on the way, and at the end."""

    def __init__(self, task: Task, model: SharedModel, tell: Listener) -> None:
        self.task, self.model, self.tell = task, model, tell
        self._last = model.start_step - 1
        """The last step of which a share is done."""
        self._awaits: dict[int, int | None] = dict.fromkeys(range(task.plan.mesh.size), -1)
        """By worker: the step before which it waits for a save; -1: it does not wait; None: it is done."""
        self._saver = Saver(
            task.folder / "checkpoints",
            keep=task.keep,
            resumed=task.resume,
            time_limit_s=task.checkpoint_timeout_s,
        )
        self._saved = -1

    def start(
        self,
        run: StartRanks,
        on_event: OnEvent,
        dispensable: Collection[int],
    ) -> list[Any]:
        """Run all ranks, and save what they have reached, also where they were interrupted."""

        def hear(rank: int, event: dict[str, Any]) -> bool:
            if "awaits_save" in event:
                self._awaits[rank] = event["awaits_save"]
                self._save_where_all_wait()
                return False
            if "share" in event:
                self._last = max(self._last, int(event["share"]["step"]))
            if "lost" in event:
                self._awaits[rank] = None
                self._save_where_all_wait()
            return on_event(rank, event)

        try:
            results = run(hear, dispensable)
        except Interrupted as stop:
            if stop.returned:
                self._close(self._last + 1)
            raise
        self._close(self._last + 1)
        return results

    def _save_where_all_wait(self) -> None:
        """Where all who are left wait, all shares before that step are in the model: save it, and let them go."""
        waiting = [step for step in self._awaits.values() if step is not None]
        if waiting and min(waiting) >= 0:
            self._save(min(waiting))
            self.model.tell_saved(min(waiting))
            for rank, step in self._awaits.items():
                if step == min(waiting):
                    self._awaits[rank] = -1

    def _save(self, steps_done: int) -> None:
        state = self.model.adopt(0)
        state.steps_done = steps_done
        self._told(self._saver.poll())  # of those before: what becomes of this one is asked at the end
        self._saver.submit(state.to_checkpoint(self.task.kept(self.model.progress)))
        self._saved = steps_done

    def _close(self, steps_done: int) -> None:
        if self._saved != steps_done:
            self._save(steps_done)
        notices = self._saver.close()
        self._told(notices)
        lost = [notice for notice in notices if notice.kind != "saved" and notice.step == steps_done]
        if lost:
            raise CheckpointError(f"the last checkpoint was not saved: {lost[-1].message}")
        if not self.model.knows_state:
            name = type(self.model.state.optimizer).__name__
            self.tell({"notice": f"the checkpoint has no state of {name}: it was in the workers alone."})

    def _told(self, notices: list[Any]) -> None:
        for notice in notices:
            self.tell(notice.event())


def on_shared_model(task: Task, tell: Listener, run: Callable[..., list[Any]]) -> StartRanks:
    """Make the model that workers share; what starts them then gives it to them, and saves it."""
    model = SharedModel(task)
    saver = ParentSaver(task, model, tell)
    return lambda on_event, dispensable: saver.start(partial(run, model=model), on_event, dispensable)
