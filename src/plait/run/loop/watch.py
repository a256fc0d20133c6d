"""What a process records of itself: its place on the board, and its trace."""

from dataclasses import dataclass
from functools import partial

import torch

from plait.files.write import write_or_tell
from plait.program.program import Program
from plait.run.interpret.observer import CudaClock, WorkerObserver, metadata_of
from plait.run.loop.task import Task
from plait.run.start.launch import Seat
from plait.trace.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """One rank's records."""

    recorder: Recorder | None
    observer: WorkerObserver

    @classmethod
    def of(cls, task: Task, seat: Seat, device: torch.device) -> "Watch":
        """As the task wants it."""
        recorder = Recorder(seat.rank, offset_ns=task.clock_offset_ns) if task.trace else None
        clock = CudaClock() if device.type == "cuda" and task.trace else None
        return cls(recorder=recorder, observer=WorkerObserver(seat.board, recorder, clock))

    def write(self, task: Task, seat: Seat, program: Program, step: int) -> None:
        """The trace of this rank, up to a step that is over."""
        if self.recorder is not None:
            self.observer.settle(step)
            path = task.folder / "trace" / f"rank{seat.rank}.json"
            flush = partial(self.recorder.flush, path, metadata=metadata_of(program))
            write_or_tell(flush, lambda text: seat.emit({"notice": text}))
