"""Segments as CUDA graphs: what a segment launches is recorded once and launched again by one call.

In: instructions that run a segment, with their inputs. Out: the same results, always in the same memory. Inputs that
are the same tensors in every step (weights, what an earlier graph made) are read where they are, all others are copied
into memory of the graph's own first. So a key of random numbers, a batch and a tangent are those of the step. The
update, communication and everything else between segments runs as always. What cannot be captured runs as it did, told
once.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.plan.decisions import Graphs
from plait.plan.plan import Plan
from plait.program.instructions import Compute

Run = Callable[..., tuple[Any, ...]]
Told = Callable[[str], None]

_WARM = 3
"""Steps before a decision: the first ones load kernels, choose between them and compile; the last one is timed."""
_WARM_ON = 1
"""Steps before capture where nothing is left to decide."""
_BUSY = 0.6
"""Where the host takes this share of the device's time to launch a step, the device runs dry now and then."""
_MOST = 256
"""Instructions of which graphs are kept: shapes that never come again must not fill the memory."""
_RECAPTURES = 4
"""Captures of one instruction before graphs are given up."""
_ROOM = 0.5
"""Graphs keep their memory between steps: with more than this share of the device reserved, nothing is captured."""


class Recorder(Protocol):
    """A device that can record what a function launches."""

    def time(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Call it; its result, and how long the device took for it, to be asked later."""

    def has_room(self) -> bool:
        """Whether the device has memory for graphs."""

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What the function returns, not computed yet, and what computes it into that memory."""


class CudaRecorder:
    """The current CUDA device; all of its graphs share memory, as they run one after the other."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """Those that somebody may still launch."""

    def time(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """By events on the stream."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        result = function()
        ended.record()

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        return result, seconds

    def has_room(self) -> bool:
        """By what torch's allocator has reserved."""
        return torch.cuda.memory_reserved() < _ROOM * torch.cuda.get_device_properties().total_memory

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Other threads may use the device meanwhile: loaders, and NCCL's watch."""
        if not self._graphs:  # torch refuses memory whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._graphs.add(graph)
        return result, graph.replay


@dataclass(slots=True)
class _Entry:
    """One instruction."""

    instruction: Compute
    """Kept, so that no other gets its id."""
    calls: int = 0
    seen: tuple[Callable[[], Any], ...] = ()
    """The inputs of the call before, as far as they still live."""
    captures: int = 0
    inputs: list[Any] = field(default_factory=list)
    """As the graph reads them."""
    copied: list[int] = field(default_factory=list)
    """Positions of those that are copied."""
    into: list[Tensor | None] = field(default_factory=list)
    results: tuple[Any, ...] = ()
    replay: Callable[[], None] | None = None

    def takes(self, args: Sequence[Any], into: Sequence[Tensor | None]) -> bool:
        """Copy what is new to where the graph reads it; False: something else has changed since it was captured."""
        copied = set(self.copied)
        for position, (given, own) in enumerate(zip(args, self.inputs, strict=True)):
            if position in copied:
                if given.shape != own.shape or given.dtype != own.dtype:
                    return False
            elif given is not own and (isinstance(own, Tensor) or given != own):
                return False
        if any(given is not own for given, own in zip(into, self.into, strict=True)):
            return False
        for position in self.copied:
            self.inputs[position].copy_(args[position], non_blocking=True)
        return True


def captured_where_it_pays(plan: Plan, device: torch.device, told: Told) -> "CapturedComputes | None":
    """What runs segments of a rank on this device; None where they are launched op by op."""
    if device.type != "cuda" or not plan.may_take_graphs:
        return None
    return CapturedComputes(CudaRecorder(), plan.graphs, told)


class CapturedComputes:
    """Runs segments of one rank, as graphs where that is possible and asked for or worth it."""

    def __init__(self, recorder: Recorder, mode: Graphs, told: Told) -> None:
        self._recorder, self._told = recorder, told
        self._mode: Graphs = mode
        self._warm = _WARM_ON if mode == "on" else _WARM
        self._decided: bool | None = True if mode == "on" else None
        self._entries: dict[int, _Entry] = {}
        self._made: dict[int, Tensor] = {}
        """What graphs make, by id."""
        self._timed: list[tuple[float, Callable[[], float]]] = []
        """Of each instruction: seconds of the host, and of the device."""

    def run(
        self, instruction: Compute, run: Run, args: list[Any], into: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        """What `run(args, into)` returns."""
        if self._decided is False:
            return run(args, into)
        entry = self._entries.get(id(instruction))
        if entry is None:
            if len(self._entries) == _MOST:
                return run(args, into)
            entry = self._entries[id(instruction)] = _Entry(instruction)
        entry.calls += 1
        if entry.replay is not None:
            if entry.takes(args, into):
                args.clear()
                entry.replay()
                return entry.results
            self._forget(entry)
        if entry.calls > self._warm:
            if self._decided is None:
                self._decide()
            return self._capture(entry, run, args, into) if self._decided else run(args, into)
        entry.seen = tuple(_weakly(value) for value in args)
        if self._decided is None and entry.calls == self._warm:
            began = time.perf_counter()
            result, seconds = self._recorder.time(lambda: run(args, into))
            self._timed.append((time.perf_counter() - began, seconds))
            return result  # type: ignore[no-any-return]
        return run(args, into)

    def restart(self) -> None:
        """Segments run another way from now on: forget all graphs, and decide anew. Between steps alone."""
        self._entries.clear()
        self._made.clear()
        self._timed.clear()
        self._decided = True if self._mode == "on" else None

    def _decide(self) -> None:
        """By the last step: whether the device waits for the host."""
        host_s = sum(entry[0] for entry in self._timed)
        device_s = sum(entry[1]() for entry in self._timed)
        self._timed.clear()
        self._decided = host_s > _BUSY * device_s and self._recorder.has_room()
        if self._decided:
            self._told(
                f"segments run as CUDA graphs: launching them took {1e3 * host_s:.2f} of {1e3 * device_s:.2f} ms "
                "a step."
            )

    def _capture(
        self, entry: _Entry, run: Run, args: list[Any], into: Sequence[Tensor | None]
    ) -> tuple[Any, ...]:
        given = list(args)
        args.clear()
        try:
            entry.copied, entry.inputs = self._own_inputs(entry, given)
            entry.into = list(into)
            entry.results, replay = self._recorder.record(lambda: run(list(entry.inputs), into))
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._give_up(f"segment {entry.instruction.segment} cannot be a CUDA graph: {reason[:200]}")
            return run(given, into)
        entry.replay, entry.captures = replay, entry.captures + 1
        self._made |= {id(result): result for result in entry.results if isinstance(result, Tensor)}
        replay()
        return entry.results

    def _forget(self, entry: _Entry) -> None:
        """What a graph reads in place has moved: capture it again, after a step that shows what stays now."""
        for result in entry.results:
            self._made.pop(id(result), None)
        entry.inputs, entry.into, entry.results, entry.replay = [], [], (), None
        entry.calls = self._warm
        if entry.captures == _RECAPTURES:
            self._give_up(
                f"segment {entry.instruction.segment} reads other memory in every step: no CUDA graphs."
            )

    def _give_up(self, why: str) -> None:
        self._decided = False
        self._told(why)
        for entry in self._entries.values():
            entry.replay = None  # their results stay: this step may still use them

    def _own_inputs(self, entry: _Entry, given: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Positions of inputs that change, and the inputs as the graph is to read them."""
        copied: list[int] = []
        inputs = list(given)
        for position, (value, before) in enumerate(zip(given, entry.seen, strict=True)):
            if isinstance(value, Tensor) and value is not before() and id(value) not in self._made:
                copied.append(position)
                inputs[position] = value.clone()
        return copied, inputs


def _weakly(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: value
