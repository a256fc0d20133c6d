"""The company of a worker that runs free of the others: servers, a center, or memory that all write to.

In: shares of steps, its own of every step or whatever is next. Out: events for the parent, who writes the journal, for
any worker may die. The worker that has the last share of a step measures, on weights of the moment; the others go on.
Who saves is whoever has the weights: a server, or the parent. Where these hold shares of several steps at any moment,
workers wait before a step at which it is time to save, until all shares before it are in: so what is saved is whole
steps, and a run that goes on from there uses each share once.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from plait.job.data.share import LoadedStep
from plait.run.interpret.machine import Machine
from plait.run.loop.keeper import steps_between_saves
from plait.run.loop.shared_model import SharedModel
from plait.run.loop.task import Task
from plait.run.loop.tickets import shared_count, shared_end, tickets
from plait.run.loop.watch import Watch
from plait.run.loop.worker import write_gradients
from plait.run.prepare.programs import Programs
from plait.run.record.evaluate import evaluate
from plait.run.record.shares import ShareLog
from plait.run.start.launch import Seat

AWAITS_SAVE = "wait for the checkpoint"
"""What a rank does that waits for others before a save."""


class Apart:
    """One worker among others that may be anywhere."""

    def __init__(
        self,
        task: Task,
        seat: Seat,
        programs: Programs,
        machine: Machine,
        watch: Watch,
        start: int,
        model: SharedModel | None = None,
    ) -> None:
        self.task, self.seat, self.programs, self.machine, self.watch = task, seat, programs, machine, watch
        self._agreement, self._workers = task.plan.agreement, task.plan.mesh.size
        takes_next = self._agreement.takes_next
        self.places: Iterable[tuple[int, int]] | None = (
            tickets(shared_count(seat), self._workers, start, shared_end(seat, self._workers))
            if takes_next
            else None
        )
        self.stopped: str | None = None
        self.is_best = False  # refused: what is measured here has changed before anybody could save it
        self._model = model
        every = task.checkpoint_every if model is not None else steps_between_saves(task)
        self._every = every if self._agreement.mingles else None
        self._next_save = (start // self._every + 1) * self._every if self._every is not None else None
        """The step before which all wait next."""
        self._log = ShareLog(task.folder, seat.rank)
        self._gradients: list[dict[str, Tensor]] = []
        if task.record_gradients and seat.rank == 0:
            machine.store.on_ready = lambda found: self._gradients.append(
                {name: gradient.clone() for name, gradient in found.items()}
            )

    def awaits_save(self, step: int) -> bool:
        """Whether all before some step up to this one is to be saved first."""
        return self._next_save is not None and step >= self._next_save

    def await_save(self, step: int) -> None:
        """All that this worker took before is in the weights: wait until that is so of everybody's, and saved."""
        assert self._next_save is not None and self._every is not None
        while self._next_save <= step:
            with self.watch.observer.beside(self._next_save - 1, "checkpoint"):
                self.seat.board.enter(self._next_save, -1, AWAITS_SAVE, waiting=True)
                if self.machine.serving.port is not None:
                    self.machine.serving.port.pause(self._next_save)
                else:
                    assert self._model is not None
                    self.seat.emit({"awaits_save": self._next_save})
                    self._model.wait_until_saved(self._next_save)
            self._next_save += self._every

    def did(self, loaded: LoadedStep) -> None:
        """Servers are told how far it is."""
        if self.machine.serving.port is not None:
            self.machine.serving.port.shares += 1
            self.machine.serving.port.next_step = max(self.machine.serving.port.next_step, loaded.step + 1)

    def tell(self, loaded: LoadedStep, told: dict[str, Any]) -> None:
        """Write it where it outlives this process, and tell the parent."""
        told["samples"] = sum(len(share.ids) for share in loaded.micro_batches)
        if self.task.record_samples:
            told["ids"] = [number for share in loaded.micro_batches for number in share.ids]
        self._log.write({"share": told})
        self.seat.emit({"share": told})

    def skip(self, step: int) -> None:
        """Whoever waits for all workers must not wait for this one."""
        if self.machine.serving.port is not None:
            self.machine.serving.port.skip(step)

    def measures(self, loaded: LoadedStep) -> bool:
        """Whether this is the last share of a step after which it is time to; a dead worker's is nobody's."""
        last = self._workers - 1
        while self.places is None and last > loaded.share and self.seat.board.is_gone(last):
            last -= 1
        every = self.task.job.evaluate_every
        due = loaded.ends_epoch if every is None else (loaded.step + 1) % every == 0
        return due and loaded.share == last

    def measure(self, step: int, epoch: int) -> None:
        """What all train, as it is now."""
        held_out, port = self.programs.held_out, self.machine.serving.port
        assert held_out is not None
        with self.watch.observer.beside(step, "evaluate"):
            if port is not None:
                port.show()
            measured = evaluate(self.machine.state, held_out, 0, 1, lambda sums: sums)
            if port is not None:
                port.restore()
        told = {"step": step, "epoch": epoch, "evaluate": measured}
        self._log.write({"evaluated": told})
        self.seat.emit({"evaluated": told})

    def save(self) -> None:
        """Who has the weights does."""

    def ends(self, loaded: LoadedStep) -> bool:
        """Where all have their own share of every step, worker 0 says which is the last; if it has died, nobody can,
        and everybody ends where it is. Those who take what is next are given no more, and use what they have."""
        if self._agreement.takes_next:
            return False
        leaderless = self.seat.board.stop_requested() and self.seat.board.is_gone(0)
        return self.seat.board.stop_after(loaded.step, self._agreement.round or 1) or leaderless

    def abandon(self) -> None:
        """Whoever saves is not this worker."""

    def close(self) -> dict[str, Any]:
        """Nothing more comes."""
        if self._model is not None:
            self.seat.emit({"awaits_save": None})
        self._log.close()
        write_gradients(self.task, self._gradients)
        port = self.machine.serving.port
        return {"bytes_sent": port.sent_bytes + self.machine.bytes_sent} if port is not None else {}
