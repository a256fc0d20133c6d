"""One rank's whole run, whatever its part: build what it holds, agree with the others, begin, work, end.

In: a task and a seat. Out: a JSON-able summary. What the rank does is in its program: a worker makes steps until
nothing is left, a server has one instruction for the whole run.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from plait.errors import SpoiledError
from plait.program.cost.layouts import prefers_channels_last
from plait.program.hops.price import choices_of
from plait.program.program import Program
from plait.program.segment.compiled import CompiledSegments, compiled_where_it_pays
from plait.program.serve.rule import histogram
from plait.run.checkpoint.state import TrainingState
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.state import ModelState
from plait.run.hold.worker_states import restore_workers
from plait.run.interpret.captured import captured_where_it_pays
from plait.run.interpret.machine import Machine
from plait.run.link.between import links_of_plan
from plait.run.link.lanes import Lanes
from plait.run.link.links import Links
from plait.run.link.mpi_links import MpiLinks
from plait.run.link.posts import posts_between
from plait.run.link.process_links import ProcessLinks
from plait.run.link.thread_links import Meetings, ThreadLinks
from plait.run.link.wire import Post
from plait.run.loop.apart import AWAITS_SAVE, Apart
from plait.run.loop.compiling import COMPILED_SINCE
from plait.run.loop.keeper import Keeper
from plait.run.loop.rescue import Rescue
from plait.run.loop.server_gradients import join_parts, write_parts
from plait.run.loop.shared_model import SharedModel
from plait.run.loop.task import Task
from plait.run.loop.threaded import Replicas
from plait.run.loop.together import Together
from plait.run.loop.watch import Watch
from plait.run.loop.worker import Company, Worker
from plait.run.prepare.programs import Programs
from plait.run.record.journal import Journal
from plait.run.record.ledger import Ledger
from plait.run.serve.optimized import Optimized
from plait.run.setup.agreement import check_agreement
from plait.run.setup.allocator import keep_freed_memory
from plait.run.setup.device import choose_device, exact_products
from plait.run.start.child import is_communication
from plait.run.start.launch import GroupKind, Seat, connect, disconnect
from plait.run.wire.emulate import Wire

_SPINS = 20
"""Looks before a server sleeps between looks."""
_SLEEP_S = 0.0002
"""A server looks again this often. Looking all the time would take a processor from the workers."""


def run_rank(task: Task, seat: Seat, programs: Programs, model: SharedModel | None = None) -> dict[str, Any]:
    """Do a rank's part; `model` is the one that workers share who write to one."""
    keep_freed_memory()
    seat.board.enter(-1, -1, "connect")
    with ExitStack() as stack:
        own = programs.full_step().of(seat.rank)
        device = torch.device("cpu") if own.serve is not None else choose_device(task.device, seat.rank)
        if task.record_gradients:
            stack.enter_context(exact_products())
        if seat.ranks > 1:
            connect(seat, _backend(task), timeout_s=task.timeout_s)
            stack.callback(disconnect)
            if task.emulation is not None:
                os.environ["PLAIT_HOST"] = f"emulated {task.emulation.host_of(seat.rank)}"
                seat.store.peers().emulate(Wire.between(task.emulation, seat.rank))
        rank = _Rank(task, seat, programs, device, model, stack)
        summary = rank.run()
        if isinstance(rank.links, MpiLinks):
            rank.links.close()
        return summary


def _backend(task: Task) -> GroupKind:
    """nccl where every worker has a GPU of its own, and nobody has none; or where the plan asks for it."""
    plan, transport = task.plan, task.plan.links.transport
    if transport == "nccl" or (
        transport == "auto"
        and task.device == "cuda"
        and plan.ranks <= torch.cuda.device_count()
        and plan.ranks == plan.mesh.size
    ):
        return "nccl"
    return "plait"


class _Rank:
    """One rank."""

    def __init__(
        self,
        task: Task,
        seat: Seat,
        programs: Programs,
        device: torch.device,
        model: SharedModel | None,
        stack: ExitStack,
    ) -> None:
        self.task, self.seat, self.programs, self.stack = task, seat, programs, stack
        self._model = model
        self.program: Program = programs.full_step()
        self.watch = Watch.of(task, seat, device)
        self.links, post = self._links(device)
        links = self.links
        if seat.rank == 0 and isinstance(links, Lanes):
            for line in choices_of(self.program, links.network):
                seat.emit({"notice": line})
        if isinstance(links, ProcessLinks):
            for part in programs.parts:
                links.meet(part.full_step().pairs(), device)
        seat.board.enter(-1, -1, "build the model")
        if model is not None:
            self.state = model.adopt(seat.rank)
        else:
            holding = programs.holding(seat.rank, links, device)
            last = prefers_channels_last(task.plan, self.program, device)
            self.state = ModelState(task.job, device, task.dtype, holding, channels_last=last)
            self.state.lay_beside(self.program.beside)
        self.state.narrow = any(part.captures.narrow for part in programs.parts)
        self._agree("initial weights", self.state.digest)
        self._agree("program", lambda: "".join(part.full_step().digest() for part in programs.parts))
        self.resumed = self._resume() if model is None else None
        self.start_step = self.state.steps_done if model is None else model.start_step
        self.progress = self.resumed.extra.get("progress", {}) if self.resumed is not None else {}
        kind = Replicas if isinstance(links, ThreadLinks) else Machine
        self.machine = kind(seat.rank, self.state, links, self.watch.observer, post=post)
        self._compile(device)
        if isinstance(self.machine, Replicas):
            self.machine.add_others(task, seat, self.program, programs.captures.layout.rows)
        for machine in (self.machine, *getattr(self.machine, "others", ())):
            machine.segments.detect_nan = task.detect_nan
            machine.straggler.factor = task.slow.get(machine.rank, 1.0)

    def run(self) -> dict[str, Any]:
        """Begin, work, end."""
        self.watch.observer.use(self.program, self.seat.rank)
        self.machine.begin(self.program)
        if self.resumed is not None:
            restore_workers(self.resumed, self.state, self.machine.averaging, self.task.plan, self.seat.rank)
            self.resumed = None
        if self.machine.serving.service is not None:
            return self._serve()
        company = self._company()
        worker = Worker(
            self.task,
            self.seat,
            self.programs,
            self.machine,
            self.watch,
            company,
            start_step=self.start_step,
        )
        rescue = worker.rescue
        if self.task.outlives and self.seat.ranks > 1:
            if isinstance(company, Together):
                rescue.listen()
                self.machine.commits.keeps_undo, self.machine.commits.on_update = True, rescue.close
            else:
                rescue.ignore()  # who has the weights hears it
        try:
            summary = worker.run()
            if isinstance(self.machine, Replicas):
                self.machine.write_traces(self.task, self.seat, self.program)
            return summary
        except SpoiledError:
            company.abandon()
            raise
        except Exception as error:
            if not (rescue.listens and isinstance(company, Together) and is_communication(error)):
                raise
            return company.hand_over(error)

    def _links(self, device: torch.device) -> tuple[Links, Post | None]:
        plan, seat, timeout_s = self.task.plan, self.seat, self.task.timeout_s
        emulation = self.task.emulation
        if plan.agreement.threads and plan.mesh.size > 1:
            return ThreadLinks(Meetings(plan.mesh), seat.rank), None
        if plan.ranks == plan.mesh.size:
            lost = seat.store.peers().lost if plan.mesh.size > 1 else lambda rank: None
            links = links_of_plan(
                plan, seat.rank, device, timeout_s=timeout_s, emulation=emulation, lost=lost
            )
            return links, None
        of_run = torch.device(self.task.device)
        return posts_between(plan, seat.rank, of_run, seat.store, timeout_s=timeout_s, emulation=emulation)

    def _resume(self) -> TrainingState | None:
        if self.task.resume is None:
            return None
        self.seat.board.enter(-1, -1, "load the checkpoint")
        saved = load_checkpoint(self.task.resume)
        self.state.load(saved)
        own, agreement = self.program.of(self.seat.rank), self.task.plan.agreement
        if (own.serve is None) == (agreement.weights == "server"):
            self.state.optimizer.state.clear()  # where another rank updates
        return saved

    def _compile(self, device: torch.device) -> None:
        """Decide how segments are run: compiled, as graphs; it is told.

        What is verified is compiled from the start; so is a run that goes on from where it was compiled.
        """
        steps = self.task.job.total_steps(self.programs.captures.source.num_samples)
        left = None if steps is None else steps - self.start_step
        compiled: CompiledSegments | None = None

        def told(segment: str, seconds: float, reason: str | None) -> None:
            how = f"compiled in {seconds:.1f} s" if reason is None else f"not compiled: {reason}"
            behind = compiled.behind if compiled is not None else None
            if behind is not None and behind.num_waiting:
                how += f" ({behind.num_waiting - behind.num_open} of {behind.num_waiting}, beside the steps)"
            self._notice(f"segment {segment} {how}.")

        if self.program.of(self.seat.rank).serve is None:
            compiled = compiled_where_it_pays(
                self.task.plan,
                self.program,
                device,
                left,
                told,
                may_wait=not self.task.record_gradients,
                since=self.progress.get(COMPILED_SINCE),
            )
            self.machine.segments.compiled = compiled
            if compiled is not None and compiled.behind is not None:
                self.stack.callback(compiled.behind.close)
            self.machine.segments.captured = captured_where_it_pays(self.task.plan, device, self._notice)

    def _notice(self, text: str) -> None:
        if self.seat.rank == 0:
            self.seat.emit({"notice": text})

    def _agree(self, what: str, digest: Callable[[], str]) -> None:
        self.seat.board.enter(-1, -1, f"compare {what}", self.seat.ranks > 1)
        check_agreement(what, digest, self.seat.ranks)

    def _company(self) -> Company:
        task, seat = self.task, self.seat
        if not task.plan.agreement.marches:
            return Apart(task, seat, self.programs, self.machine, self.watch, self.start_step, self._model)
        ledger = None
        if seat.rank == 0:
            below = self.start_step if task.resume is not None or task.attempt else None
            journal = Journal(
                task.folder,
                seat.emit,
                keep_below=below,
                samples=task.record_samples,
                says_all=task.tell_every_step,
            )
            ledger = Ledger(self.stack.enter_context(journal), 1, None, {})
        return Together(task, seat, self.programs, self.machine, self.watch, ledger, self.progress)

    def _serve(self) -> dict[str, Any]:
        """Be a server to the end of the run."""
        service, task, seat = self.machine.serving.service, self.task, self.seat
        assert service is not None
        service.is_gone = seat.board.is_gone
        service.on_work = lambda what, step: self.watch.observer.serving(service.serve, what, step)
        gradients: list[dict[str, Tensor]] = []
        if task.record_gradients and isinstance(service.holder, Optimized):
            service.holder.store.on_ready = lambda found: gradients.append(
                {name: gradient.clone() for name, gradient in found.items()}
            )
        keeper = Keeper(service, task, seat.emit, self.progress)
        if task.plan.agreement.mingles:
            service.on_pause = keeper.before
            service.on_wait = lambda step, waits: seat.board.enter(step, -1, AWAITS_SAVE, waits)
        else:
            service.after_update = keeper.after_update
        patience, rescue = _Patience(), Rescue()
        if task.outlives:
            rescue.listen()
        for turns in (keeper.save(60.0), self.machine.execute(self.program, self.start_step, ())):
            for _ in turns:
                patience.wait(service.streams.taken)
                if rescue.is_asked and task.holds_all:  # between two updates, each of which is a whole step
                    return keeper.hand_over(seat)
        self.state.steps_done = service.reached
        write_parts(task, service.shard, gradients)
        for _ in keeper.close():
            patience.wait(service.streams.taken)
        if service.shard == 0:
            join_parts(task, self.state, len(gradients))
        self.watch.write(task, seat, self.program, self.state.steps_done)
        counted: dict[str, Any] = {"bytes_sent": service.streams.sent_bytes}
        if service.shard == 0:
            counted |= {"updates": service.rule.applied, "staleness": histogram([service.rule.staleness])}
        return counted


class _Patience:
    """Gives the processor away while there is nothing to do."""

    def __init__(self) -> None:
        self._spins = 0
        self._last = -1

    def wait(self, done: int) -> None:
        self._spins = 0 if done != self._last else self._spins + 1
        self._last = done
        if self._spins < _SPINS:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)
