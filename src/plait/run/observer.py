"""What a worker tells others about itself while it works: its place, for the launcher; its spans, for the trace."""

from collections.abc import Mapping
from typing import Any, Protocol

from plait.program.instructions import Collective, Instruction, Wait
from plait.program.program import Program
from plait.trace.recorder import Recorder

_PER_PROGRAM = 1_000_000
"""Instruction ids of a run's n-th program start at n times this."""


class Place(Protocol):
    """A rank's slot on the launcher's board."""

    def enter(self, step: int, index: int, label: str, waiting: bool = False) -> None: ...


class WorkerObserver:
    """Writes every instruction to the board and to the recorder."""

    def __init__(self, place: Place | None, recorder: Recorder | None) -> None:
        self._place = place
        self._recorder = recorder
        self._base = 0
        self._bases: dict[int, int] = {}
        self._programs: list[Program] = []
        self._started: dict[int, int] = {}

    def use(self, program: Program, rank: int) -> None:
        """Instructions from here on are those of `program`."""
        key = id(program)
        if key not in self._bases:
            self._bases[key] = len(self._bases) * _PER_PROGRAM
            self._programs.append(program)  # keeps the id from being used again
            if self._recorder is not None:
                self._describe(program, rank, self._bases[key])
        self._base = self._bases[key]

    def _describe(self, program: Program, rank: int, base: int) -> None:
        assert self._recorder is not None
        for instruction in program.of(rank).instructions:
            self._recorder.describe(
                base + instruction.id,
                kind=instruction.kind,
                name=instruction.name,
                lane=instruction.lane,
                micro_batch=instruction.micro_batch,
                stage=instruction.stage,
                num_bytes=instruction.num_bytes,
            )

    def entering(self, step: int, instruction: Instruction, waiting: bool) -> None:
        """Called before an instruction."""
        if self._place is not None:
            self._place.enter(step, instruction.id, instruction.name, waiting)

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        """Called after an instruction; a collective lasts until it was waited for."""
        if self._recorder is None:
            return
        if isinstance(instruction, Collective):
            self._started[instruction.id] = start_ns
            return
        if isinstance(instruction, Wait):
            began = self._started.pop(instruction.of, start_ns)
            self._recorder.record(step, self._base + instruction.of, began, end_ns)
        self._recorder.record(step, self._base + instruction.id, start_ns, end_ns)


def metadata_of(program: Program) -> Mapping[str, Any]:
    """What a trace says about where it came from."""
    return {"plan": program.plan.name, "mesh": dict(program.plan.mesh.axes)}
