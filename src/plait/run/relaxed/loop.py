"""The loop of a worker that does not march in step with others: take a share of a step, compute, tell the parent.

In: programs, a machine, places (which share of which step comes next) and `Weights`, which know where weights come from
and who keeps them. Out: events for the parent, who writes the journal; a small summary. What differs between plans is
in the program and in `Weights`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from plait.errors import RunError
from plait.job.data.loader import LoadedStep, Loader
from plait.program.averaging import due
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.interpret.observer import CudaClock, WorkerObserver, metadata_of
from plait.run.loop.evaluate import evaluate
from plait.run.loop.journal import peak_bytes
from plait.run.loop.shares import ShareLog
from plait.run.loop.worker import Task
from plait.run.prepare.programs import Programs
from plait.run.start.launch import Seat
from plait.trace.recorder import Recorder


class Weights(Protocol):
    """Where a worker's weights come from, and who keeps them."""

    def refresh(self) -> None:
        """Bring the model up to date, before it is measured."""

    def restore(self) -> None:
        """It was measured: go on with what this worker trains."""

    def skip(self, step: int) -> None:
        """This worker has no samples of a step."""

    def after(self, loaded: LoadedStep) -> None:
        """A share is done."""

    def close(self) -> dict[str, Any]:
        """Nothing more comes from this worker; what it has counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """What a process records of itself."""

    recorder: Recorder | None
    observer: WorkerObserver

    @classmethod
    def of(cls, task: Task, seat: Seat, device: torch.device) -> "Watch":
        """As the task wants it."""
        recorder = Recorder(seat.rank, offset_ns=task.clock_offset_ns) if task.trace else None
        clock = CudaClock() if device.type == "cuda" and task.trace else None
        return cls(recorder=recorder, observer=WorkerObserver(seat.board, recorder, clock))

    def write(self, task: Task, seat: Seat, program: Program) -> None:
        """The trace of this rank."""
        if self.recorder is not None:
            path = task.folder / "trace" / f"rank{seat.rank}.json"
            path.parent.mkdir(exist_ok=True)
            self.recorder.flush(path, metadata=metadata_of(program))


class FreeWorker:
    """One worker's run."""

    def __init__(
        self,
        task: Task,
        seat: Seat,
        programs: Programs,
        machine: Machine,
        watch: Watch,
        weights: Weights,
        *,
        start_step: int,
        places: Iterable[tuple[int, int]] | None,
        stops: Callable[[int], bool],
    ) -> None:
        """`places`: what it takes, None: its own share of every step; `stops`: whether a step was to be the last."""
        self.task, self.seat, self.programs, self.machine = task, seat, programs, machine
        self.watch, self.weights, self.stops = watch, weights, stops
        self.start_step, self.places = start_step, places
        self.job, self.workers = task.job, task.plan.mesh.size
        self.log = ShareLog(task.folder, seat.rank)
        self.num_shares = 0
        """That this worker has taken, empty ones too."""

    def run(self) -> dict[str, Any]:
        """Work until nothing is left, or the run is to stop."""
        program: Program | None = None
        with self._loader() as loader:
            for loaded in self._timed(loader):
                program = self._step(loaded) or program
                self.weights.after(loaded)
                if self._evaluation_is_due(loaded):
                    self._evaluate(loaded)
                if self.stops(loaded.step):
                    break
        counted = self.weights.close()
        self.log.close()
        if program is not None:
            self.watch.write(self.task, self.seat, program)
            counted["notices"] = list(program.notices)
            counted["gradient_bytes"] = program.gradient_bytes
        return counted

    def _loader(self) -> Loader:
        job, source = self.job, self.programs.captures.source
        return Loader(
            source=source,
            order=job.order(source.num_samples),
            batch=job.batch,
            accumulate=job.accumulate,
            rank=self.seat.rank,
            ranks=self.workers,
            start_step=self.start_step,
            stop_step=self.task.stop_step if self.task.stop_step is not None else job.steps,
            epochs=job.epochs,
            depth=2 if self.places is None else 1,
            places=self.places,
        )

    def _timed(self, loader: Loader) -> Iterator[LoadedStep]:
        steps, number = iter(loader), self.start_step
        while True:
            with self.watch.observer.beside(number, "data"):
                loaded = next(steps, None)
            if loaded is None:
                return
            yield loaded
            number = loaded.step + 1

    def _step(self, loaded: LoadedStep) -> Program | None:
        """Compute on one share, and tell of it; None where it is empty."""
        shares = self.programs.own_shares(loaded.micro_batches)
        fragments = due(self.task.plan, self.num_shares, loaded.ends_epoch)
        self.num_shares += 1
        if not shares and not fragments:
            self.weights.skip(loaded.step)
            self._tell(loaded, 0.0, 0.0)
            return None
        with self.watch.observer.beside(loaded.step, "host"):
            program = self.programs.for_step(shares, fragments)
        self.watch.observer.use(program, self.seat.rank)
        with torch.no_grad():
            for _ in self.machine.execute(program, loaded.step, shares):
                raise AssertionError("a process waits inside its links, never outside")
        outcome = self.machine.outcome
        if outcome is None:
            self._tell(loaded, 0.0, 0.0)
            return program
        total, weight = float(outcome.total), float(outcome.weight)
        self.watch.observer.settle(loaded.step)
        if not math.isfinite(total / weight):
            raise RunError(
                f"the loss is {total / weight} at step {loaded.step} (epoch {loaded.epoch}).",
                fix="lower the learning rate, set clip_norm, or check the data for NaN.",
            )
        late = any("weight" in bucket.scalars for bucket in program.buckets)
        everybody = not self.task.plan.sync.alone and not late  # the weight of all shares together
        self._tell(loaded, total, weight / self.workers if everybody else weight)
        return program

    def _tell(self, loaded: LoadedStep, total: float, weight: float) -> None:
        state = self.machine.state
        state.schedule.apply(state.optimizer, loaded.step)
        ids = [number for share in loaded.micro_batches for number in share.ids]
        told: dict[str, Any] = {
            "step": loaded.step,
            "share": loaded.share,
            "epoch": loaded.epoch,
            "total": total,
            "weight": weight,
            "samples": len(ids),
            "lr": state.optimizer.param_groups[0]["lr"],
            "ended_s": time.monotonic(),
            "memory_bytes": peak_bytes(state.device),
        }
        if self.task.record_samples:
            told["ids"] = ids
        self.log.write({"share": told})
        self.seat.emit({"share": told})

    def _evaluation_is_due(self, loaded: LoadedStep) -> bool:
        """The worker that has the last share of a step measures, on weights of the moment; the others go on."""
        if self.job.evaluate is None:
            return False
        last = self.workers - 1
        while self.places is None and last > loaded.share and self.seat.board.is_gone(last):
            last -= 1
        if loaded.share != last:
            return False
        every = self.job.evaluate_every
        return loaded.ends_epoch if every is None else (loaded.step + 1) % every == 0

    def _evaluate(self, loaded: LoadedStep) -> None:
        held_out = self.programs.held_out
        assert held_out is not None
        with self.watch.observer.beside(loaded.step, "evaluate"):
            self.weights.refresh()
            measured = evaluate(self.machine.state, held_out, 0, 1, lambda sums: sums)
            self.weights.restore()
        told = {"step": loaded.step, "epoch": loaded.epoch, "evaluate": measured}
        self.log.write({"evaluated": told})
        self.seat.emit({"evaluated": told})
