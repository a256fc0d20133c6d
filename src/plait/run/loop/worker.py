"""One worker's run: take a share of a step, compute, tell of it, step after step.

In: a `Task`, a seat among the ranks, a machine that is ready, and the worker's `Company`: where weights come from, who
saves and measures them, and when it ends. Out: what is told of every step, and a small summary. The loop is the same
for every plan: what differs is in the program and in the company.
"""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.dynamic.counts import taken_counts
from plait.job.data.loader import Loader
from plait.job.data.share import LoadedStep
from plait.job.data.source import Stream
from plait.job.updates.follow import TRAIN_LOSS
from plait.program.program import Program
from plait.run.interpret.machine import Machine
from plait.run.interpret.outcome import StepOutcome
from plait.run.loop.compiling import Compiling
from plait.run.loop.guard import Guard
from plait.run.loop.rescue import Rescue
from plait.run.loop.task import Task
from plait.run.loop.watch import Watch
from plait.run.prepare.programs import Programs
from plait.run.record.journal import peak_bytes
from plait.run.start.launch import Seat


class Company(Protocol):
    """What a worker has to do with the others of its run."""

    places: Iterable[tuple[int, int]] | None
    """(step, share) that it takes; None: its own share of every step."""
    stopped: str | None
    """Why training ends before its end."""
    is_best: bool
    """Whether the model just measured better than ever, and is to be saved for it."""

    def awaits_save(self, step: int) -> bool:
        """Whether this worker must wait for a save before its share of a step."""

    def await_save(self, step: int) -> None:
        """Wait for it."""

    def did(self, loaded: LoadedStep) -> None:
        """This worker has had its share of a step."""

    def tell(self, loaded: LoadedStep, told: dict[str, Any]) -> None:
        """What is known of a share that is done."""

    def skip(self, step: int) -> None:
        """This worker has no samples of a step."""

    def measures(self, loaded: LoadedStep) -> bool:
        """Whether this worker takes part in measuring the model after a step."""

    def measure(self, step: int, epoch: int) -> None:
        """Measure the model that all workers train."""

    def save(self) -> None:
        """Save it, where that is for workers to do; all of them come here."""

    def ends(self, loaded: LoadedStep) -> bool:
        """Whether a step was the last, because somebody wants the run to end."""

    def abandon(self) -> None:
        """The run is spoiled: have on disk what was saved while it was good."""

    def close(self) -> dict[str, Any]:
        """Nothing more comes from this worker; what it has counted."""


class Worker:
    """The loop."""

    def __init__(
        self,
        task: Task,
        seat: Seat,
        programs: Programs,
        machine: Machine,
        watch: Watch,
        company: Company,
        *,
        start_step: int,
    ) -> None:
        self.task, self.seat, self.programs, self.machine = task, seat, programs, machine
        self.watch, self.company, self.start_step = watch, company, start_step
        self.job, self.plan = task.job, task.plan
        self.guard = Guard(
            task.plan, seat.ranks, machine.state, compare_every=task.compare_every, spike=task.spike
        )
        self.num_shares = 0
        """That this worker has taken, empty ones too."""
        self.rescue = Rescue()
        self.compiling = Compiling(machine.segments, task.plan, seat, start_step)
        self._unread: tuple[LoadedStep, Program, StepOutcome, float] | None = None

    def run(self) -> dict[str, Any]:
        """Work until nothing is left, or the run is to stop."""
        program: Program | None = None
        taken_counts(self.machine.state.model)  # of trials
        started = time.perf_counter()
        with self._loader() as loader:
            for loaded in self._timed(loader):
                if self.company.awaits_save(loaded.step):
                    self._catch_up()
                    self.company.await_save(loaded.step)
                left_out = loaded.step in self.task.leave_out
                if left_out:
                    self._leave_out(loaded)
                else:
                    program = self._step(loaded) or program
                self.company.did(loaded)
                self._catch_up()  # with the step before, which a GPU is still busy with: its end paces the loop
                if not left_out:
                    self._note(loaded, program, time.perf_counter() - started)
                self._after(loaded)
                self._compile(loaded.step, time.perf_counter() - started)
                self._tell_damage()
                started = time.perf_counter()
                if self.company.stopped is None and self.company.ends(loaded):
                    self.company.stopped = "interrupted"
                if self.company.stopped is not None:
                    break
        self._catch_up()
        last = program or self.programs.full_step()
        with self.rescue.waiting():
            self.machine.end(last)
            self._compare()
            counted = self.company.close()
        self.watch.write(self.task, self.seat, last, self.machine.state.steps_done)
        return {
            "stopped": self.company.stopped,
            "notices": [*(program.notices if program is not None else ()), *self._skipped()],
            "gradient_bytes": program.gradient_bytes if program is not None else 0,
            "graphs": taken_counts(self.machine.state.model),
            **self._compiled(),
            **counted,
        }

    def _compile(self, step: int, step_s: float) -> None:
        """Use what was compiled meanwhile, if all ranks can."""
        with self.rescue.waiting():
            self.compiling.after(step, step_s)

    def _compiled(self) -> dict[str, Any]:
        compiled = self.machine.segments.compiled
        return {} if compiled is None else {"compiled": compiled.counted()}

    def _skipped(self) -> list[str]:
        scale = self.machine.state.loss_scale
        if scale is None or not scale.skipped:
            return []
        return [
            f"{scale.skipped} steps overflowed in fp16 and were skipped; the loss scale is {scale.factor:g}."
        ]

    def _loader(self) -> Loader:
        job, source = self.job, self.programs.captures.source
        places = self.company.places
        if isinstance(source, Stream) and self.seat.rank == 0:
            for line in source.limits(workers=job.workers, start_step=self.start_step):
                self.seat.emit({"notice": line})
        return Loader(
            source=source,
            order=job.order(source.num_samples),
            batch=job.batch,
            accumulate=job.accumulate,
            rank=self.plan.data_coordinate(self.seat.rank),
            ranks=self.plan.data_ranks,
            start_step=self.start_step,
            stop_step=self.task.stop_step if self.task.stop_step is not None else job.steps,
            epochs=job.epochs,
            depth=job.prefetch if places is None else 1,
            places=places,
            rows=self.programs.rows,
            workers=job.workers,
            draws=job.draws,
            whole=self.plan.agreement.threads,
            pin=self.machine.state.device.type == "cuda",
        )

    def _tell_damage(self) -> None:
        for source in (self.programs.captures.source, self.programs.held_out):
            for line in source.damage.lines() if source is not None and source.damage is not None else ():
                self.seat.emit({"notice": line})

    def _timed(self, loader: Loader) -> Iterator[LoadedStep]:
        """The loader's steps; the time for which they are not ready yet counts as data, of steps that come."""
        steps, number = iter(loader), self.start_step
        while True:
            try:
                with self.watch.observer.beside(number, "data"):
                    loaded = next(steps)
            except StopIteration:
                return
            yield loaded
            number = loaded.step + 1

    def _step(self, loaded: LoadedStep) -> Program | None:
        """Compute on one share; None where it is empty."""
        agreement = self.plan.agreement
        programs = self.programs.at(loaded.step)
        shares = programs.own_shares(loaded.micro_batches)
        number = self.num_shares if agreement.takes_next else loaded.step
        fragments = agreement.due(number, loaded.ends_epoch)
        self.num_shares += 1
        if not shares and not fragments:
            self.company.skip(loaded.step)
            self.machine.skip(loaded.step)
            return None
        with self.watch.observer.beside(loaded.step, "host"):
            program = programs.for_step(shares, fragments)
        for notice in programs.news():
            self.seat.emit({"notice": notice})
        self.watch.observer.use(program, self.seat.rank)
        with torch.no_grad(), self.rescue.waiting():
            for _ in self.machine.execute(program, loaded.step, shares):
                raise AssertionError("a process waits inside its links, never outside")
        return program

    def _leave_out(self, loaded: LoadedStep) -> None:
        """Go past a step without training it; all workers do."""
        self.machine.skip(loaded.step)
        if self.seat.rank == 0:
            self.seat.emit(
                {"notice": f"step {loaded.step + 1} is left out: its {len(loaded.ids)} samples are not used."}
            )

    def _compare(self) -> None:
        """Whether the ranks still hold the same weights; all of them must ask."""
        step = self.machine.state.steps_done - 1
        self.seat.board.enter(step, -1, "compare weights")
        self.guard.compare(step)

    def _note(self, loaded: LoadedStep, program: Program | None, elapsed_s: float) -> None:
        outcome = self.machine.outcome
        if outcome is None or program is None:
            self._tell(loaded, 0.0, 0.0, elapsed_s, None)
        else:
            self._unread = (loaded, program, outcome, elapsed_s)

    def _after(self, loaded: LoadedStep) -> None:
        every = self.task.checkpoint_every
        saves = every is not None and (loaded.step + 1) % every == 0
        measures = self.job.evaluate is not None and self.company.measures(loaded)
        follows = self.job.follow == TRAIN_LOSS  # the next step's learning rate may depend on this one's loss
        if self.machine.state.device.type == "cpu" or saves or measures or follows:
            self._catch_up()
        with self.rescue.waiting():
            if measures:
                self.company.measure(loaded.step, loaded.epoch)
                saves = saves or self.company.is_best
            if saves or self.guard.is_due(loaded.step):
                self._compare()  # what is saved is what all agree on
            if saves:
                self.company.save()

    def _catch_up(self) -> None:
        """Read the numbers of the last step. On a GPU this is done one step late, so that it never runs dry."""
        if self._unread is None:
            return None
        loaded, program, outcome, elapsed_s = self._unread
        self._unread = None
        if self.seat.ranks > 1 and self.machine.state.device.type == "cuda":
            # the host has run ahead: here it waits for whatever the device waits for
            self.seat.board.enter(loaded.step, -1, "the device", True)
        loss = outcome.loss
        self.watch.observer.settle(loaded.step - 1)  # the loss is there before the rest of its step
        if self.machine.state.loss_scale is None or math.isfinite(loss):  # else the step was skipped
            self.guard.check_loss(loss, loaded)
        self.machine.state.observe({TRAIN_LOSS: loss})
        if self.plan.agreement.marches:
            return self._tell(loaded, loss, 1.0, elapsed_s, outcome.norm)
        weight = float(outcome.weight)
        if not self.plan.agreement.alone and not any("weight" in b.scalars for b in program.buckets):
            weight /= self.plan.mesh.size  # of all shares together
        return self._tell(loaded, float(outcome.total), weight, elapsed_s, outcome.norm)

    def _tell(
        self, loaded: LoadedStep, total: float, weight: float, elapsed_s: float, norm: Tensor | None
    ) -> None:
        state = self.machine.state
        told: dict[str, Any] = {
            "step": loaded.step,
            "share": loaded.share,
            "epoch": loaded.epoch,
            "total": total,
            "weight": weight,
            "lr": state.rate(loaded.step),
            "step_s": elapsed_s,
            "ended_s": time.monotonic(),
            "ends_epoch": loaded.ends_epoch,
            "memory_bytes": peak_bytes(state.device),
        }
        if norm is not None:
            told["grad_norm"] = float(norm)
        self.company.tell(loaded, told)


def write_gradients(task: Task, gradients: Iterable[dict[str, Tensor]]) -> None:
    """For verification: the gradients of every step."""
    for step, entry in enumerate(gradients):
        save_file(entry, task.folder / f"gradients-{step:06d}.safetensors")
