"""What a worker tells others about itself while it works: its slot on the board, its spans for the trace."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch

from plait.latest import Latest
from plait.program.instructions import Collective, Exchange, Handler, Instruction, Pull, Serve, Wait
from plait.program.program import Program
from plait.run.link.background import HopSpan
from plait.trace.recorder import Recorder

_PER_PROGRAM = 1_000_000
"""Instruction ids of a run's n-th program start at n times this."""
_STARTING = 500_000
"""Added to the id of a collective or pull: the time for which starting it kept the compute lane busy."""
_HOPS = 950_000_000
"""Ids of messages of collectives start here."""
Beside = Literal["data", "host", "evaluate", "checkpoint"]
_BESIDE: dict[Beside, tuple[int, str]] = {
    "data": (900_000_000, "wait for the loader"),
    "host": (900_000_001, "find or compile the program"),
    "evaluate": (900_000_002, "evaluate"),
    "checkpoint": (900_000_003, "hand over a checkpoint"),
}
"""Ids of spans that are no instructions."""


class Slot(Protocol):
    """A rank's slot on the launcher's board."""

    def enter(self, step: int, index: int, label: str, waiting: bool = False) -> None: ...


class CudaClock:
    """When a GPU's stream began and ended something, told in the host's time once the GPU has got there."""

    def __init__(self) -> None:
        self._origin = self.mark()
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        """The moment at which the stream will have done all that it was given so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def host_ns(self, moment: "Moment") -> int:
        """A moment in the host's time; waits for a mark that the stream has not passed yet."""
        if isinstance(moment, int):
            return moment
        moment.synchronize()
        return self._origin_ns + int(self._origin.elapsed_time(moment) * 1e6)


Moment = int | torch.cuda.Event
"""Nanoseconds of the host, or a mark on the device's stream."""


_PROGRAMS = 16
"""Programs that are remembered, so that memory is bounded; one that comes again later is described again."""


class WorkerObserver:
    """Writes every instruction to the board and to the recorder; on a GPU, as long as the GPU took for it."""

    def __init__(self, slot: Slot | None, recorder: Recorder | None, clock: CudaClock | None = None) -> None:
        self._clock = clock
        self._began: torch.cuda.Event | None = None
        self._unsettled: list[tuple[int, int, Moment, Moment]] = []
        self._slot = slot
        self._recorder = recorder
        self._base = 0
        self._num_programs = 0
        self._bases = Latest[int, tuple[int, Program]](_PROGRAMS)
        self._started: dict[int, Moment | None] = {}
        self._hops: dict[str, int] = {}
        """Ids of messages of collectives, by their names."""
        self._handles: tuple[Handler, int] = ("update", 0)
        """What a server does, and since when."""
        if recorder is not None:
            for kind, (number, name) in _BESIDE.items():
                recorder.describe(number, kind=kind, name=name, lane="compute")

    @contextmanager
    def beside(self, step: int, kind: Beside) -> Iterator[None]:
        """Work between steps that is no instruction, but takes time that the trace should show."""
        if self._slot is not None:
            self._slot.enter(step, -1, kind, False)
        began = time.perf_counter_ns()
        yield
        self.record(step, _BESIDE[kind][0], began, time.perf_counter_ns())

    def use(self, program: Program, rank: int) -> None:
        """Instructions from here on are those of `program`."""
        key = id(program)
        known = self._bases.get(key)
        if known is None:
            known = (self._num_programs * _PER_PROGRAM, program)  # keeps the id from being used again
            self._num_programs += 1
            self._bases.put(key, known)
            if self._recorder is not None:
                self._describe(program, rank, known[0])
        self._base = known[0]

    def _describe(self, program: Program, rank: int, base: int) -> None:
        assert self._recorder is not None
        for instruction in program.of(rank).everything:
            if isinstance(instruction, Serve):
                for handler in instruction.handlers:
                    kind: Literal["update", "communication"] = (
                        "update" if handler == "update" else "communication"
                    )
                    number = base + instruction.work(handler)
                    self._recorder.describe(number, kind=kind, name=handler, lane="compute")
                continue
            self._recorder.describe(
                base + instruction.id,
                kind=instruction.kind,
                name=instruction.name,
                lane=instruction.lane,
                micro_batch=instruction.micro_batch,
                stage=instruction.stage,
                num_bytes=instruction.num_bytes,
            )
            if isinstance(instruction, Collective | Pull):
                self._recorder.describe(
                    base + _STARTING + instruction.id,
                    kind="wait",
                    name=f"start {instruction.name}",
                    lane="compute",
                    micro_batch=instruction.micro_batch,
                    stage=instruction.stage,
                )

    def entering(self, step: int, instruction: Instruction, waiting: bool) -> None:
        """Called before an instruction."""
        if self._slot is not None:
            self._slot.enter(step, instruction.id, _label(instruction), waiting)
        if self._clock is not None:
            self._began = self._clock.mark()

    def done(self, step: int, instruction: Instruction, start_ns: int, end_ns: int) -> None:
        """Called after an instruction; a collective or a pull lasts until it was waited for."""
        if self._recorder is None:
            return
        began: Moment = start_ns
        ended: Moment = end_ns
        if self._clock is not None:  # the host has long gone on: what counts is when the device came by
            assert self._began is not None
            began, ended = self._began, self._clock.mark()
        if isinstance(instruction, Collective | Pull):
            self._started[instruction.id] = began
            self.record(step, self._base + _STARTING + instruction.id, began, ended)
            return
        if isinstance(instruction, Exchange):  # what counts is how long it takes to send
            self._started[instruction.id] = None
        if isinstance(instruction, Wait):
            started = self._started.pop(instruction.of, began)
            if started is not None:
                self.record(step, self._base + instruction.of, started, ended)
        self.record(step, self._base + instruction.id, began, ended)

    def hopped(self, step: int, hops: Sequence[HopSpan]) -> None:
        """Called after a collective that was made hop by hop: each message is a span, within that of the collective."""
        if self._recorder is None:
            return
        for name, start_ns, end_ns in hops:
            number = self._hops.get(name)
            if number is None:
                number = self._hops[name] = _HOPS + len(self._hops)
                self._recorder.describe(number, kind="communication", name=name, lane="communication")
            self.record(step, number, start_ns, end_ns)

    def serving(self, serve: Serve, what: Handler | None, step: int) -> None:
        """Called before a server handles something, and (None) after it."""
        if what is not None:
            self._handles = (what, time.perf_counter_ns())
            if self._slot is not None:
                self._slot.enter(step, serve.id, f"serve: {what}")
        else:
            handled, began = self._handles
            self.record(step, self._base + serve.work(handled), began, time.perf_counter_ns())

    def record(self, step: int, number: int, began: Moment, ended: Moment) -> None:
        """One span; on a GPU it is kept until the device has finished the step."""
        if self._recorder is None:
            return
        if self._clock is not None:
            self._unsettled.append((step, number, began, ended))
        else:
            assert isinstance(began, int) and isinstance(ended, int)
            self._recorder.record(step, number, began, ended)

    def settle(self, step: int) -> None:
        """Write down what the device did up to the end of `step`."""
        if self._clock is None or self._recorder is None:
            return
        done = [entry for entry in self._unsettled if entry[0] <= step]
        self._unsettled = [entry for entry in self._unsettled if entry[0] > step]
        for of_step, number, began, ended in done:
            self._recorder.record(of_step, number, self._clock.host_ns(began), self._clock.host_ns(ended))


def _label(instruction: Instruction) -> str:
    """What a person needs to find the place: of a pipeline, the stage and the micro-batch too."""
    if instruction.stage is None:
        return instruction.name
    told = instruction.micro_batch is None or "micro-batch" in instruction.name
    number = "" if told else f", micro-batch {instruction.micro_batch}"
    return f"{instruction.name} of stage {instruction.stage}{number}"


def metadata_of(program: Program) -> Mapping[str, Any]:
    """What a trace says about where it came from."""
    return {"plan": program.plan.name, "mesh": dict(program.plan.mesh.axes)}
