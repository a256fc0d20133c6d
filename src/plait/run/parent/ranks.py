"""All ranks of a task: in this process where there is one, else in processes of their own, here and on other hosts.

In: a task and its programs. Out: what each rank returned.
"""

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from plait.run.loop.rank import run_rank
from plait.run.loop.shared_model import SharedModel
from plait.run.loop.task import Task
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.start.guardian import Guardian
from plait.run.start.launch import Losses, OtherTasks, Seat, launch
from plait.run.start.processes import Start
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower
from plait.run.start.watch.interrupts import SIGNALS


def run_ranks(
    guardian: Guardian,
    party: First | None,
    task: Task,
    programs: Programs,
    on_event: Callable[[int, dict[str, Any]], bool | None],
    dispensable: Collection[int],
    model: SharedModel | None = None,
) -> list[Any]:
    """Run every rank, the only one in this process; returns what each returned."""
    ranks, main = task.plan.processes, Main(task, programs, model)
    assert party is None or not (model is not None or task.plan.agreement.threads), "refused before"
    if ranks == 1:
        with _interruptible() as seat_with:
            return [main(seat_with(on_event))]
    return launch(
        main,
        ranks=ranks,
        threads_per_rank=threads_per_rank(
            ranks if party is None else len(party.members.seats(ranks)[0]), party
        ),
        hang_s=task.hang_s,
        start=start_of(programs),
        on_event=on_event,
        run_dir=task.folder,
        losses=Losses(dispensable=dispensable, outlives=task.outlives, holds_all=task.holds_all),
        guardian=guardian,
        tasks=None if party is None else OtherTasks(party=party, told=_told(task), resume=task.resume),
    )


def _told(task: Task) -> dict[str, Any]:
    """What other tasks must know of this round."""
    return {
        "leave_out": sorted(task.leave_out),
        "clock_offset_ns": task.clock_offset_ns,
        "plan": task.plan.to_yaml() if task.attempt else None,
        "attempt": task.attempt,
        "holds_all": task.outlives and task.holds_all,
        "outlives": task.outlives,
    }


def threads_per_rank(ranks: int, party: First | Follower | None) -> int:
    """This host's processors, shared among the ranks that are on it: `ranks` of this task, and those of others. No more
    than this task may use, and than the user allows (`OMP_NUM_THREADS`), as with one rank."""
    place = None if party is None else party.place
    here = ranks * (place.local_tasks if place is not None else 1)
    least = [(os.cpu_count() or 1) // max(1, here)]
    if hasattr(os, "sched_getaffinity"):
        least.append(len(os.sched_getaffinity(0)) // max(1, ranks))
    allowed = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    is_torchruns = (
        place is not None and place.engine == "torchrun" and place.local_tasks > 1
    )  # which sets it to 1
    if allowed.isdecimal() and not is_torchruns:
        least.append(int(allowed))
    return max(1, min(least))


def start_of(programs: Programs) -> Start:
    """Fresh interpreters for a model that runs eagerly on a build for GPUs: the attempt to capture it has started
    threads of autograd, whatever the device, and with those a fork cannot differentiate."""
    is_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    return "spawn" if is_gpu_build and programs.capture_error is not None else "auto"


class Main:
    """What a worker process runs. Spawned ones rebuild the programs, which hold compiled functions."""

    def __init__(self, task: Task, programs: Programs, model: SharedModel | None) -> None:
        self.task = task
        self.programs: Programs | None = programs
        self.model = model

    def __getstate__(self) -> dict[str, Any]:
        return {"task": self.task, "programs": None, "model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.task, self.programs, self.model = state["task"], state["programs"], state["model"]

    def __call__(self, seat: Seat) -> dict[str, Any]:
        if self.programs is None:
            task = self.task
            self.programs = prepare(task.job, task.plan, task.device, task.dtype, lambda event: None)
        return run_rank(self.task, seat, self.programs, self.model)


class _OwnBoard:
    """The board of a run without a launcher: only Ctrl-C is asked for."""

    def __init__(self) -> None:
        self.stop = False

    def enter(self, step: int, index: int, label: str, waiting: bool = False) -> None:
        pass

    def stop_after(self, step: int, ahead: int = 1) -> bool:
        return self.stop

    def stop_requested(self) -> bool:
        return self.stop

    def is_gone(self, rank: int) -> bool:
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnSeat:
    """The seat of the only rank."""

    board: _OwnBoard
    on_event: Callable[[int, dict[str, Any]], bool | None]
    rank: int = 0
    ranks: int = 1

    def emit(self, event: dict[str, Any]) -> None:
        """Tell whoever watches, who may want the run to end."""
        if self.on_event(0, event):
            self.board.stop = True


@contextmanager
def _interruptible() -> Iterator[Callable[[Callable[[int, dict[str, Any]], bool | None]], Any]]:
    """One rank in this process: the first signal ends after the step, a second Ctrl-C at once (see `Interrupts`)."""
    board = _OwnBoard()

    def stop(number: int, frame: Any) -> None:
        if board.stop and number == signal.SIGINT:
            again = before.get(signal.SIGINT)
            if not callable(again):
                raise KeyboardInterrupt
            again(number, frame)
        board.stop = True

    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in SIGNALS} if in_main else {}
    try:
        yield lambda on_event: _OwnSeat(board=board, on_event=on_event)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
