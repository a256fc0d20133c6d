"""Time the ops of a program on this device, one by one, in the order in which the program runs them.

In: what a rank does in a step, some of its data. Out: seconds by `op_key`. Every op finds its inputs where the op
before left them, so caches are as warm as they will be; nothing is communicated: what others would send is made up.
On a GPU the ops are queued behind a pause, so that the host never keeps the device waiting while it is timed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops.random import random_key
from plait.program.cost.op_key import op_key
from plait.program.instructions import Compute
from plait.program.program import RankProgram, Spec
from plait.program.segment.codegen import function_of
from plait.program.value import Value
from plait.torch_private import cuda, pytree

_LASTING = ("parameter", "buffer")
"""Kinds of values that are made up once."""
_SMALL = 0.02
"""Spread of made-up numbers: products of many of them stay of their size."""
_PAUSE_CYCLES = 40_000_000
"""About 20 ms of a GPU's clock: longer than the host needs to queue so many ops."""
_PER_PAUSE = 250
"""Ops that are queued behind one pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTimes:
    """What was found."""

    seconds: Mapping[str, float]
    """By `op_key`; the mean where an op occurs several times."""
    host_s: float
    """Mean time that the host needs to start one op; on a processor, zero."""


@dataclass(slots=True)
class _Samples:
    """Times of every op, by its place in the program."""

    device_s: list[list[float]] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)


def time_ops(
    own: RankProgram,
    batch: Sequence[Tensor],
    device: torch.device,
    *,
    busy: int,
    passes: int = 7,
    between: Callable[[], None] = lambda: None,
) -> OpTimes:
    """Run every segment once a pass; `between` is called before each pass, for ranks that measure together."""
    computes = _first_of_each_segment(own)
    nodes = [node for compute in computes for node in own.segments[compute.segment].nodes]
    values = _Values(own, batch, device)
    samples = _Samples(device_s=[[] for _ in nodes])
    clock = clock_of(device)
    with torch.no_grad():
        for number in range(passes + 1):
            between()
            clock.begin()
            _run(own, computes, values, device, clock)
            times, host_s = clock.end()
            if number > 0:  # the first pass allocates and chooses kernels
                for found, seconds in zip(samples.device_s, times, strict=True):
                    found.append(seconds)
                samples.host_s.append(host_s)
    by_key: dict[str, list[float]] = {}
    for node, seconds in zip(nodes, typical(samples.device_s), strict=True):
        by_key.setdefault(op_key(node, busy), []).append(seconds)
    host_s = median(samples.host_s) / max(len(nodes), 1) if device.type == "cuda" else 0.0
    return OpTimes(seconds={key: mean(found) for key, found in by_key.items()}, host_s=host_s)


def typical(times: Sequence[Sequence[float]]) -> list[float]:
    """Of every op its median, scaled so that together they take as long as the median pass.

    Where more processes work than there are processors, each loses its own now and then: in the median of a short op
    that does not show, in a pass it does.
    """
    alone = [median(found) for found in times]
    passes = [sum(one) for one in zip(*times, strict=True)]
    return [seconds * median(passes) / sum(alone) for seconds in alone] if sum(alone) > 0 else alone


def clock_of(device: torch.device) -> "_HostClock | _DeviceClock":
    """What tells how long calls take on a device."""
    return _DeviceClock() if device.type == "cuda" else _HostClock()


def _first_of_each_segment(own: RankProgram) -> list[Compute]:
    found: dict[str, Compute] = {}
    for instruction in own.instructions:
        if isinstance(instruction, Compute):
            found.setdefault(instruction.segment, instruction)
    return list(found.values())


def _run(
    own: RankProgram,
    computes: Sequence[Compute],
    values: "_Values",
    device: torch.device,
    clock: "_HostClock | _DeviceClock",
) -> None:
    for compute in computes:
        segment = own.segments[compute.segment]
        local = {name: values.get(read) for name, read in zip(segment.inputs, compute.reads, strict=True)}
        values.drop(compute.frees)
        for node, (name, dying) in zip(segment.nodes, segment.steps, strict=True):
            local[name] = clock.time(*_call(node, local, device))
            for other in dying:
                local.pop(other, None)
        for name, write in zip(segment.outputs, compute.writes, strict=True):
            values.put(write, local[name])
        values.drop(compute.frees)


def _call(
    node: fx.Node, local: Mapping[str, Any], device: torch.device
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    def real(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return local[value.name]
        return device if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(real, (tuple(node.args), dict(node.kwargs)))
    return function_of(node.target), args, kwargs


class _HostClock:
    """On a processor an op is over when its call returns."""

    def begin(self) -> None:
        self._times: list[float] = []

    def time(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        self._times.append((time.perf_counter_ns() - start) * 1e-9)
        return result

    def end(self) -> tuple[list[float], float]:
        return self._times, 0.0


class _DeviceClock:
    """On a GPU: marks between ops that are queued behind a pause; the host's time is that of its calls.

    The queue holds about a thousand kernels, after which the host would have to wait: there is a pause every few ops.
    """

    def __init__(self) -> None:
        self.begin()
        for _ in range(_PER_PAUSE):
            self.time(lambda: None, (), {})
        self._nothing_s = 0.0
        self._nothing_s = median(self.end()[0])

    def begin(self) -> None:
        torch.cuda.synchronize()
        self._host_s = 0.0
        self._marks: list[list[torch.cuda.Event]] = []

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def time(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._marks or len(self._marks[-1]) > _PER_PAUSE:
            torch.cuda.synchronize()
            cuda.sleep(_PAUSE_CYCLES)
            self._marks.append([self._mark()])
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        self._host_s += (time.perf_counter_ns() - start) * 1e-9
        self._marks[-1].append(self._mark())
        return result

    def end(self) -> tuple[list[float], float]:
        torch.cuda.synchronize()
        found = [
            before.elapsed_time(after) * 1e-3 for marks in self._marks for before, after in pairwise(marks)
        ]
        return [max(0.0, seconds - self._nothing_s) for seconds in found], self._host_s


class _Values:
    """The tensors between segments; what nobody made is made up."""

    def __init__(self, own: RankProgram, batch: Sequence[Tensor], device: torch.device) -> None:
        self._own, self._device = own, device
        self._batch = [leaf.to(device) for leaf in batch]
        self._lasting: dict[Value, Any] = {}
        self._now: dict[Value, Any] = {}

    def get(self, name: Value) -> Any:
        for known in (self._now, self._lasting):
            if name in known:
                return known[name]
        made = self._make(name)
        (self._lasting if name.kind in _LASTING else self._now)[name] = made
        return made

    def put(self, name: Value, value: Any) -> None:
        self._now[name] = value

    def drop(self, names: Sequence[Value]) -> None:
        for name in names:
            self._now.pop(name, None)

    def _make(self, value: Value) -> Any:
        if value in self._own.constants:
            return self._own.constants[value].to(self._device)
        if value.kind == "batch":
            return self._batch[value.number]
        if value.kind == "offset":
            return 0
        if value.kind == "key":
            return random_key(seed=0, step=0, micro_batch=0, first_sample=0, device=self._device)
        spec = self._own.values.get(value)
        if spec is None:
            return torch.ones((), device=self._device)
        return _random(spec, self._device, positive=value.kind == "buffer")


def _random(value: Spec, device: torch.device, *, positive: bool) -> Tensor:
    strides = value.strides or torch.empty(value.shape, device="meta").stride()
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)
    if not value.dtype.is_floating_point:
        return made.zero_()
    return made.fill_(1.0) if positive or not value.shape else made.normal_(0.0, _SMALL)
