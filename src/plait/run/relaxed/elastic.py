"""A process that has the center of easgd's workers, and a process that is one of them.

In: a task and a seat. Out: what the summary of the run says of exchanges. The center is what is saved and measured;
a worker's own weights and its optimizer's state are nobody else's, and a run that resumes starts all workers from the
center.
"""

from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.job.data.loader import LoadedStep
from plait.program.averaging import longest_round
from plait.program.serve.rule import histogram
from plait.run.checkpoint.store import load_checkpoint
from plait.run.interpret.machine import Machine
from plait.run.interpret.state import ModelState
from plait.run.loop.worker import Task
from plait.run.prepare.programs import Programs
from plait.run.relaxed.center import Center, CenterPort
from plait.run.relaxed.keeper import Keeper
from plait.run.relaxed.loop import FreeWorker, Watch
from plait.run.relaxed.posts import posts_between
from plait.run.relaxed.serve import Patience, Spans, first_program
from plait.run.relaxed.start import takes_tickets
from plait.run.relaxed.tickets import shared_count, tickets
from plait.run.start.agreement import check_agreement
from plait.run.start.launch import Seat


def serve_center(task: Task, seat: Seat, programs: Programs) -> dict[str, Any]:
    """Have the center to the end of the run."""
    plan, device = task.plan, torch.device("cpu")
    _, post = posts_between(task, seat)
    state = ModelState(task.job, device, task.dtype)
    check_agreement("initial weights", state.digest(), seat.ranks)
    progress: dict[str, Any] = {}
    if task.resume is not None:
        saved = load_checkpoint(task.resume)
        state.load(saved)
        state.optimizer.state.clear()  # each worker has its own
        progress = saved.extra.get("progress", {})
    start, program = state.steps_done, first_program(programs)
    center = Center(plan, post, state, program, start)
    center.is_gone = seat.board.is_gone
    watch = Watch.of(task, seat, device)
    center.on_work = Spans(watch, seat)
    keeper = Keeper(center, task, lambda text: seat.emit({"notice": text}), progress)
    center.after_update = keeper.after_update
    patience = Patience()
    for turns in (keeper.save(60.0), center.execute()):
        for _ in turns:
            patience.wait(center.streams.taken)
    state.steps_done = center.reached
    for _ in keeper.close():
        patience.wait(center.streams.taken)
    watch.write(task, seat, program)
    return {
        "updates": center.applied,
        "staleness": histogram([center.staleness]),
        "bytes_sent": center.streams.sent_bytes,
    }


def work_around_center(task: Task, seat: Seat, programs: Programs, device: torch.device) -> dict[str, Any]:
    """Be a worker that is drawn to the center."""
    plan = task.plan
    links, post = posts_between(task, seat)
    state = ModelState(task.job, device, task.dtype)
    check_agreement("initial weights", state.digest(), seat.ranks)
    if task.resume is not None:
        state.load(load_checkpoint(task.resume))
    watch = Watch.of(task, seat, device)
    machine = Machine(seat.rank, state, links, watch.observer)
    machine.slowdown = task.slow.get(seat.rank, 1.0)
    flats = first_program(programs).of(seat.rank).averages
    machine.center = port = CenterPort(plan, post, state, flats, waits=True)
    gradients: list[dict[str, Tensor]] = []
    if task.record_gradients and seat.rank == 0:
        machine.store.on_ready = lambda found: gradients.append({n: g.clone() for n, g in found.items()})
    start, ahead = state.steps_done, longest_round(plan) or 1
    free = takes_tickets(plan)
    worker = FreeWorker(
        task,
        seat,
        programs,
        machine,
        watch,
        Drawn(port, start),
        start_step=start,
        places=tickets(shared_count(seat), plan.mesh.size, start) if free else None,
        stops=(lambda step: seat.stop_requested())
        if free
        else (lambda step: seat.board.stop_after(step, ahead)),
    )
    counted = worker.run()
    for step, entry in enumerate(gradients):
        save_file(entry, task.folder / f"gradients-{step:06d}.safetensors")
    return counted


class Drawn:
    """`Weights` that are a worker's own, around a center."""

    def __init__(self, port: CenterPort, start: int) -> None:
        self._port = port
        self._next = start

    def refresh(self) -> None:
        """What is measured is the center."""
        self._port.show(self._next)

    def restore(self) -> None:
        """Its own weights again."""
        self._port.restore()

    def skip(self, step: int) -> None:
        """Nobody waits for a share."""

    def after(self, loaded: LoadedStep) -> None:
        """Count it."""
        self._port.shares += 1
        self._next = max(self._next, loaded.step + 1)

    def close(self) -> dict[str, Any]:
        """Leave."""
        self._port.leave(self._next)
        return {"bytes_sent": self._port.sent_bytes}
