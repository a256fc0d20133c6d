"""One rank's whole run: build, maybe resume, train step after step, evaluate, save.

In: a `Task` (job, plan, settings) and a seat among the ranks. Out: files in the run folder, written by rank
0, and a small summary. The loop is the same for every plan: what differs is in the program.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from plait.errors import CheckpointError, RunError
from plait.job.data.loader import LoadedStep, Loader
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.program.averaging import averages, due, longest_round, mixes
from plait.program.program import Program
from plait.program.segment.compiled import CompiledSegments, pays
from plait.run.checkpoint.saver import Saver
from plait.run.checkpoint.state import TrainingState, snapshot
from plait.run.checkpoint.store import load_checkpoint
from plait.run.interpret.copies import copies_of
from plait.run.interpret.machine import Machine, StepOutcome
from plait.run.interpret.observer import CudaClock, WorkerObserver, metadata_of
from plait.run.interpret.state import ModelState
from plait.run.interpret.worker_states import restore_workers, with_workers
from plait.run.link.exchange import ProcessExchange
from plait.run.link.shared_links import links_between
from plait.run.loop.evaluate import Progress, evaluate
from plait.run.loop.journal import Journal, peak_bytes
from plait.run.prepare.programs import Programs
from plait.run.start.agreement import check_agreement
from plait.run.start.allocator import keep_freed_memory
from plait.run.start.device import choose_device, exact_products
from plait.run.start.launch import Seat, connect, disconnect
from plait.trace.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every rank is told."""

    job: Job
    plan: Plan
    folder: Path
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    stop_step: int | None = None
    """Train up to, not including, this step; None: to the end of the job."""
    resume: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_timeout_s: float = 120.0
    record_samples: bool = False
    record_gradients: bool = False
    """Write every step's gradients to the folder, for verification."""
    trace: bool = True
    clock_offset_ns: int | None = None
    hang_s: float = 300.0
    slow: Mapping[int, float] = field(default_factory=dict)
    """Ranks that are to take so many times as long to compute as they need."""


def run_worker(task: Task, seat: Seat, programs: Programs) -> dict[str, Any]:
    """Train; returns a JSON-able summary."""
    keep_freed_memory()
    seat.board.enter(-1, -1, "connect")
    with ExitStack() as stack:
        device = choose_device(task.device, seat.rank)
        if task.record_gradients:
            stack.enter_context(exact_products())
        if seat.ranks > 1:
            nccl = device.type == "cuda" and seat.ranks <= torch.cuda.device_count()
            connect(seat, "nccl" if nccl else "plait", timeout_s=timeout_s(task))
            stack.callback(disconnect)
        return _Worker(task, seat, programs, device, stack).run()


class _Worker:
    def __init__(
        self, task: Task, seat: Seat, programs: Programs, device: torch.device, stack: ExitStack
    ) -> None:
        self.task, self.seat, self.programs, self.device = task, seat, programs, device
        self.job = task.job
        self.is_first = seat.rank == 0
        self.source = programs.captures.source
        self.recorder = Recorder(seat.rank, offset_ns=task.clock_offset_ns) if task.trace else None
        clock = CudaClock() if device.type == "cuda" and task.trace else None
        self.observer = WorkerObserver(seat.board, self.recorder, clock)
        links = links_between(task.plan.mesh, seat.rank, device, timeout_s=timeout_s(task))
        seat.board.enter(-1, -1, "build the model")
        self.state = ModelState(self.job, device, task.dtype, programs.holding(seat.rank, links, device))
        self.progress = Progress(self.job.until)
        self.start_step = 0
        self.resumed: TrainingState | None = None
        if task.resume is not None:
            seat.board.enter(-1, -1, "load the checkpoint")
            self._resume(task.resume)
        self.machine = Machine(seat.rank, self.state, links, self.observer)
        self.machine.slowdown = task.slow.get(seat.rank, 1.0)
        if task.record_gradients:
            self.machine.store.on_ready = self._keep_gradients
        self.gradients: list[dict[str, Tensor]] = []
        self.saver = (
            Saver(task.folder / "checkpoints", time_limit_s=task.checkpoint_timeout_s)
            if self.is_first
            else None
        )
        below = self.start_step if task.resume is not None else None
        self.journal = (
            stack.enter_context(
                Journal(task.folder, seat.emit, keep_below=below, samples=task.record_samples)
            )
            if self.is_first
            else None
        )
        self.losses: list[float] = []
        self.unread: tuple[LoadedStep, StepOutcome, float] | None = None
        self.stopped: str | None = None
        self.last_saved = -1
        self.evaluation: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        self._agree("initial weights", self.state.digest())
        if self.resumed is not None:
            restore_workers(self.resumed, self.state, self.machine.averaging, self.task.plan, self.seat.rank)
            self.resumed = None
        program: Program | None = None
        started = time.perf_counter()
        with self._loader() as loader:
            for loaded in self._timed(loader):
                shares = self.programs.own_shares(loaded.micro_batches)
                with self.observer.beside(loaded.step, "host"):
                    fragments = due(self.task.plan, loaded.step, loaded.ends_epoch)
                    program = self.programs.for_step(shares, fragments)
                if loaded.step == self.start_step:
                    self._agree("program", program.digest())
                    self._compile(program)
                self.observer.use(program, self.seat.rank)
                with torch.no_grad():
                    for _ in self.machine.execute(program, loaded.step, shares):
                        raise AssertionError("a process waits inside its links, never outside")
                self._catch_up()  # with the step before, which a GPU is still busy with: its end paces the loop
                self._after_step(loaded, time.perf_counter() - started)
                started = time.perf_counter()
                if self.stopped is not None:
                    break
        return self._finish(program)

    def _compile(self, program: Program) -> None:
        """Decide whether segments are compiled as they are first run, which is told."""
        steps = self.job.total_steps(self.source.num_samples)
        if not pays(self.task.plan, program, self.device, None if steps is None else steps - self.start_step):
            return

        def told(segment: str, seconds: float, reason: str | None) -> None:
            if self.is_first:
                how = f"compiled in {seconds:.1f} s" if reason is None else f"not compiled: {reason}"
                self.seat.emit({"notice": f"segment {segment} {how}."})

        self.machine.compiled = CompiledSegments(self.device, told)

    def _timed(self, loader: Loader) -> Iterator[LoadedStep]:
        """The loader's steps; the time for which they are not ready yet counts as data."""
        steps = iter(loader)
        number = self.start_step
        while True:
            with self.observer.beside(number, "data"):
                loaded = next(steps, None)
            if loaded is None:
                return
            yield loaded
            number += 1

    def _loader(self) -> Loader:
        job = self.job
        stop = self.task.stop_step if self.task.stop_step is not None else job.steps
        return Loader(
            source=self.source,
            order=job.order(self.source.num_samples),
            batch=job.batch,
            accumulate=job.accumulate,
            rank=self.task.plan.data_coordinate(self.seat.rank),
            ranks=self.task.plan.data_ranks,
            start_step=self.start_step,
            stop_step=stop,
            epochs=job.epochs,
        )

    def _resume(self, path: Path) -> None:
        state = self.resumed = load_checkpoint(path)
        self.state.load(state)
        self.start_step = state.step
        self.progress.load(state.extra.get("progress", {}))

    def _after_step(self, loaded: LoadedStep, elapsed_s: float) -> None:
        outcome = self.machine.outcome
        if outcome is not None:
            self.unread = (loaded, outcome, elapsed_s)
        every = self.task.checkpoint_every
        saves = every is not None and (loaded.step + 1) % every == 0
        if self.device.type == "cpu" or saves or self._evaluation_is_due(loaded):
            self._catch_up()
        if self._evaluation_is_due(loaded):
            self._evaluate(loaded.step, loaded.epoch)
        if saves:
            self._save()
        if self.stopped is None and self._is_stopped_after(loaded):
            self.stopped = "interrupted"

    def _is_stopped_after(self, loaded: LoadedStep) -> bool:
        """Whether an interrupted run ends here, which all ranks must know of: it lasts until they have met."""
        ahead = longest_round(self.task.plan)
        if ahead is None and not loaded.ends_epoch:
            return False
        return self.seat.board.stop_after(loaded.step, ahead or 1)

    def _catch_up(self) -> None:
        """Read the numbers of the last step. On a GPU this is done one step late, so that it never runs dry."""
        if self.unread is None:
            return
        loaded, outcome, elapsed_s = self.unread
        self.unread = None
        loss = outcome.loss
        self.losses.append(loss)
        self.observer.settle(loaded.step)
        if not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {loaded.step} (epoch {loaded.epoch}).",
                fix="lower the learning rate, set clip_norm, or check the data for NaN; "
                f"the last checkpoint is of step {self.last_saved}."
                if self.last_saved >= 0
                else "lower the learning rate, set clip_norm, or check the data for NaN.",
            )
        if self.journal is not None:
            self.journal.write_step(self._metrics(loaded, loss, elapsed_s, outcome.norm), loaded.ids)

    def _metrics(
        self, loaded: LoadedStep, loss: float, elapsed_s: float, norm: Tensor | None
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "step": loaded.step,
            "epoch": loaded.epoch,
            "loss": loss,
            "lr": self.state.optimizer.param_groups[0]["lr"],
            "samples_per_s": len(loaded.ids) / elapsed_s,
            "step_s": elapsed_s,
        }
        if norm is not None:
            entry["grad_norm"] = float(norm)
        entry["memory_bytes"] = peak_bytes(self.device)
        return entry

    def _evaluation_is_due(self, loaded: LoadedStep) -> bool:
        every = self.job.evaluate_every
        due = loaded.ends_epoch if every is None else (loaded.step + 1) % every == 0
        return due and self.job.evaluate is not None

    def _evaluate(self, step: int, epoch: int) -> None:
        with self.observer.beside(step, "evaluate"):
            held_out = self.programs.held_out
            assert held_out is not None
            plan = self.task.plan
            with (
                self.machine.averaging.shown(plan, self._add_up),
                self.state.whole_model(self._exchange),
            ):
                self.evaluation = evaluate(
                    self.state, held_out, self.seat.rank, self.seat.ranks, self._add_up
                )
        if self.journal is not None:
            self.journal.write_evaluation({"step": step, "epoch": epoch, "evaluate": self.evaluation})
        reason = self.progress.reached(self.evaluation)
        if reason is not None:
            self.stopped = reason

    def _add_up(self, tensor: Tensor) -> Tensor:
        if self.seat.ranks > 1:
            placed = tensor.to(self.device) if dist.get_backend() == "nccl" else tensor
            dist.all_reduce(placed)
            return placed.cpu()
        return tensor

    def _agree(self, what: str, digest: str) -> None:
        self.seat.board.enter(self.start_step, -1, f"compare {what}", self.seat.ranks > 1)
        check_agreement(what, digest, self.seat.ranks)

    def _save(self) -> None:
        plan, averaging = self.task.plan, self.machine.averaging
        alone = self.state.holding is None and not averages(plan)
        if self.last_saved == self.state.steps_done or (self.saver is None and alone):
            return
        if self.journal is not None:
            self.journal.flush()  # a run resumed from here must find what led here, whatever kills this one
        with self.observer.beside(self.state.steps_done - 1, "checkpoint"):
            with averaging.shown(plan, self._add_up):
                state = self.state.to_checkpoint(self._extra(), self._exchange)
                state = snapshot(state) if averages(plan) else state  # before each has its own back
            state = with_workers(state, self.state, averaging, plan, self.seat.rank)
            if self.saver is not None:
                self.saver.submit(state)
        self.last_saved = self.state.steps_done
        if self.saver is not None:
            self._tell(self.saver.poll())

    @property
    def _exchange(self) -> ProcessExchange | None:
        holding = self.state.holding
        return ProcessExchange(holding.layout) if holding is not None else None

    def _extra(self) -> dict[str, Any]:
        return {
            "seed": self.job.seed,
            "batch": self.job.batch,
            "progress": self.progress.state(),
            "plan": self.task.plan.name,
        }

    def _tell(self, notices: list[Any]) -> None:
        for notice in notices:
            if notice.kind != "saved":
                self.seat.emit({"notice": notice.message})

    def _keep_gradients(self, gradients: dict[str, Tensor]) -> None:
        holding, exchange = self.state.holding, self._exchange
        if holding is not None and exchange is not None:
            names = sorted({name for told in exchange.tell(list(gradients)) for name in told})
            nothing = torch.empty(0, dtype=self.task.dtype, device=self.device)
            gradients = {n: holding.assemble(n, gradients.get(n, nothing), exchange) for n in names}
        if self.is_first:
            self.gradients.append(
                {name: g.detach().cpu().clone().contiguous() for name, g in gradients.items()}
            )

    def _write_proof(self) -> None:
        """What a verification compares and a checkpoint does not hold: gradients, and every rank's own copies."""
        folder, rank = self.task.folder, self.seat.rank
        for step, entry in enumerate(self.gradients):  # of the first rank
            save_file(entry, folder / f"gradients-{step:06d}.safetensors")
        if not mixes(self.task.plan):  # those differ until they meet
            held = {name: t.cpu().clone().contiguous() for name, t in copies_of(self.state, rank).items()}
            save_file(held, folder / f"held-{rank:06d}.safetensors")

    def _finish(self, program: Program | None) -> dict[str, Any]:
        self._catch_up()
        if self.job.evaluate is not None and not self.evaluation and self.stopped != "interrupted":
            self._evaluate(self.state.steps_done - 1, 0)
        if self.journal is not None:
            self.journal.say_newest()
        self._save()
        self.seat.board.enter(self.state.steps_done - 1, -1, "finish")
        notices = self.saver.close() if self.saver is not None else []
        self._tell(notices)
        if self.task.record_gradients:
            self._write_proof()
        if self.recorder is not None and program is not None:
            self.observer.settle(self.state.steps_done)
            path = self.task.folder / "trace" / f"rank{self.seat.rank}.json"
            path.parent.mkdir(exist_ok=True)
            self.recorder.flush(path, metadata=metadata_of(program))
        lost = [
            notice for notice in notices if notice.kind != "saved" and notice.step == self.state.steps_done
        ]
        if lost:
            raise CheckpointError(f"the last checkpoint was not saved: {lost[-1].message}")
        return {
            "losses": self.losses,
            "stopped": self.stopped,
            "evaluation": self.evaluation,
            "steps": self.state.steps_done,
            "notices": list(program.notices) if program is not None else [],
            "updates": len(self.losses) * (self.task.plan.mesh.size if self.task.plan.sync.alone else 1),
            "bytes_sent": self.machine.bytes_sent,
            "gradient_bytes": program.gradient_bytes if program is not None else 0,
        }


def timeout_s(task: Task) -> float:
    """Longer than the launcher's patience, which knows more about a hang."""
    return 2 * task.hang_s + 60
