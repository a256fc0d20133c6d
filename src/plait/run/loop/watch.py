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

    rank: int
    recorder: Recorder | None
    observer: WorkerObserver

    @classmethod
    def of(cls, task: Task, seat: Seat, device: torch.device, rank: int | None = None) -> "Watch":
        """As the task wants it; `rank`: of another one in this process, which is not on the board."""
        own, board = (seat.rank, seat.board) if rank is None else (rank, None)
        recorder = Recorder(own, offset_ns=task.clock_offset_ns) if task.trace else None
        clock = CudaClock() if device.type == "cuda" and task.trace else None
        return cls(rank=own, recorder=recorder, observer=WorkerObserver(board, recorder, clock))

    def write(self, task: Task, seat: Seat, program: Program, step: int) -> None:
        """The trace of this rank, up to a step that is over."""
        if self.recorder is not None:
            self.observer.settle(step)
            path = task.folder / "trace" / f"rank{self.rank}.json"
            flush = partial(self.recorder.flush, path, metadata=metadata_of(program))
            write_or_tell(flush, lambda text: seat.emit({"notice": text}))
