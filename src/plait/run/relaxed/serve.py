"""A process that is a server, and a process that is a worker of servers.

In: a task and a seat. Out: what the run's summary says of staleness, updates and bytes. A server looks for messages and
sleeps a little where there are none; it ends when all workers have left or died.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.job.data.loader import LoadedStep
from plait.program.program import Program
from plait.program.serve.rule import histogram, rule_of
from plait.run.checkpoint.store import load_checkpoint
from plait.run.interpret.holding import Holding
from plait.run.interpret.machine import Machine
from plait.run.interpret.state import ModelState
from plait.run.link.links import NoLinks
from plait.run.loop.worker import Task
from plait.run.prepare.programs import Programs
from plait.run.relaxed.keeper import Keeper
from plait.run.relaxed.loop import FreeWorker, Watch
from plait.run.relaxed.parts import server_layout
from plait.run.relaxed.port import Port
from plait.run.relaxed.posts import posts_between
from plait.run.relaxed.server import Server
from plait.run.relaxed.start import takes_tickets
from plait.run.relaxed.tickets import shared_count, tickets
from plait.run.start.agreement import check_agreement
from plait.run.start.launch import Seat

_SPINS = 20
"""Looks before a server sleeps between looks."""
_SLEEP_S = 0.0002
"""A server looks again this often. Looking all the time would take a processor from the workers."""
_WORK = ("push", "buffers", "skip", "pull", "bye", "squares", "state", "update", "exchange")
"""What a server's spans are; their ids are places here."""


def first_program(programs: Programs) -> Program:
    """The program of a full step, whose buckets are those of all."""
    return programs.full_step()


def server_state(programs: Programs, place: int, device: torch.device) -> ModelState:
    """What a server holds: all of the model, or its part where there are several servers."""
    job, dtype, servers = programs.job, programs.captures.dtype, programs.plan.sync.servers
    if servers == 1:
        return ModelState(job, device, dtype)
    model = job.build_model().to(dtype)
    layout = server_layout(first_program(programs).buckets, dict(model.named_parameters()), servers)
    return ModelState(job, device, dtype, Holding(layout, place, NoLinks(), device))


def serve(task: Task, seat: Seat, programs: Programs) -> dict[str, Any]:
    """Be a server to the end of the run."""
    plan, device = task.plan, torch.device("cpu")
    place = seat.rank - plan.mesh.size
    _, post = posts_between(task, seat)
    state = server_state(programs, place, device)
    check_agreement("initial weights", state.digest(), seat.ranks)
    progress: dict[str, Any] = {}
    if task.resume is not None:
        saved = load_checkpoint(task.resume)
        state.load(saved)
        progress = saved.extra.get("progress", {})
    start, program = state.steps_done, first_program(programs)
    rule = rule_of(plan, start)
    server = Server(plan, place, post, state, program, rule, clip_norm=task.job.clip_norm)
    server.is_gone, server.reached = seat.board.is_gone, start
    gradients: list[dict[str, Tensor]] = []
    if task.record_gradients:
        server.store.on_ready = lambda found: gradients.append({n: g.clone() for n, g in found.items()})
    watch = Watch.of(task, seat, device)
    server.on_work = Spans(watch, seat)
    keeper = Keeper(server, task, lambda text: seat.emit({"notice": text}), progress)
    server.after_update = keeper.after_update
    patience = Patience()
    for turns in (keeper.save(60.0), server.execute()):
        for _ in turns:
            patience.wait(server.streams.taken)
    state.steps_done = server.reached
    _write_gradients(task, place, gradients)
    for _ in keeper.close():
        patience.wait(server.streams.taken)
    if place == 0:
        _join_gradients(task, state, len(gradients))
    watch.write(task, seat, program)
    if place > 0:
        return {"bytes_sent": server.streams.sent_bytes}
    return {
        "updates": rule.applied,
        "staleness": histogram([rule.staleness]),
        "bytes_sent": server.streams.sent_bytes,
    }


def work(task: Task, seat: Seat, programs: Programs, device: torch.device) -> dict[str, Any]:
    """Be a worker of servers."""
    plan = task.plan
    links, post = posts_between(task, seat)
    state = ModelState(task.job, device, task.dtype)
    check_agreement("initial weights", state.digest(), seat.ranks)
    if task.resume is not None:
        state.load(load_checkpoint(task.resume))
        state.optimizer.state.clear()  # the servers have it
    watch = Watch.of(task, seat, device)
    machine = Machine(seat.rank, state, links, watch.observer)
    machine.slowdown = task.slow.get(seat.rank, 1.0)
    machine.port = port = Port(plan, post, state, first_program(programs).buckets, waits=True)
    start, ahead = state.steps_done, plan.sync.staleness + 1
    free = takes_tickets(plan)
    worker = FreeWorker(
        task,
        seat,
        programs,
        machine,
        watch,
        _Served(port, machine, start),
        start_step=start,
        places=tickets(shared_count(seat), plan.mesh.size, start) if free else None,
        stops=(lambda step: seat.stop_requested())
        if free
        else (lambda step: seat.board.stop_after(step, ahead) or _is_leaderless(seat)),
    )
    return worker.run()


def _is_leaderless(seat: Seat) -> bool:
    """Whether the run is to end and worker 0, who says when, has died: then everybody ends where it is."""
    return seat.stop_requested() and seat.board.is_gone(0)


class _Served:
    """`Weights` that servers hold."""

    def __init__(self, port: Port, machine: Machine, start: int) -> None:
        self._port = port
        self._machine = machine
        self._next = start

    def refresh(self) -> None:
        self._port.refresh(self._next)

    def restore(self) -> None:
        pass  # the next step pulls what it needs

    def skip(self, step: int) -> None:
        self._port.skip(step)

    def after(self, loaded: LoadedStep) -> None:
        self._next = max(self._next, loaded.step + 1)

    def close(self) -> dict[str, Any]:
        self._port.leave(self._next)
        return {"bytes_sent": self._port.sent_bytes + self._machine.bytes_sent}


class Spans:
    """Writes what a server does to the board and the trace."""

    def __init__(self, watch: Watch, seat: Seat) -> None:
        self._watch, self._seat = watch, seat
        self._began = 0
        self._what = ""
        if watch.recorder is not None:
            for number, what in enumerate(_WORK):
                is_update = what == "update"
                watch.recorder.describe(
                    number, kind="update" if is_update else "communication", name=what, lane="compute"
                )

    def __call__(self, what: str, step: int) -> None:
        if what:
            self._what, self._began = what, time.perf_counter_ns()
            self._seat.board.enter(step, 0, f"serve: {what}")
        else:
            number = _WORK.index(self._what)
            self._watch.observer.record(step, number, self._began, time.perf_counter_ns())


class Patience:
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


def _write_gradients(task: Task, place: int, gradients: list[dict[str, Tensor]]) -> None:
    """For verification: this server's part of every update's gradients."""
    for number, entry in enumerate(gradients):
        save_file({name: part.contiguous() for name, part in entry.items()}, _gradients(task, number, place))


def _join_gradients(task: Task, state: ModelState, count: int) -> None:
    """Put the parts of all servers together; the others have written theirs before they gave up their state."""
    for number in range(count):
        parts = [load_file(_gradients(task, number, place)) for place in range(task.plan.sync.servers)]
        whole = parts[0]
        if state.holding is not None:
            layout = state.holding.layout
            whole = {name: layout.assemble(name, [part[name] for part in parts]) for name in parts[0]}
        save_file(whole, task.folder / f"gradients-{number:06d}.safetensors")


def _gradients(task: Task, number: int, place: int) -> Path:
    return task.folder / f"gradients-{number:06d}-of-server-{place}.safetensors"
