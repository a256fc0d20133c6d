"""Segments put through Inductor: the same nodes, another function that runs them.

In: a segment. Out: a function that compiles itself when it is first called, because strides are known only then, and is
the segment's own, with the reason told, where Inductor cannot. Segments, and layers of one, that are alike up to the
names of their nodes share what was compiled. Gradients are still written straight into the memory that the caller
gives. It never changes what is computed beyond rounding, and never draws random numbers: those stay calls of our own
ops.
"""

import operator
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from plait.plan.plan import Plan
from plait.program.program import Program, Segment
from plait.program.segment.behind import Behind
from plait.program.segment.codegen import Fill, find_fills
from plait.program.segment.layers import Run, chain, pieces_of, text_of
from plait.program.segment.runs import plain, tried, with_memory
from plait.program.segment.standalone import (
    decompositions_for,
    given_of,
    graph_of,
    likes_of,
)
from plait.torch_private.inductor import InductorError, Like, compile_graph, is_checked

Told = Callable[[str, float, str | None], None]
"""(segment, seconds it took to compile, why it could not be)."""


_SECONDS_PER_OP = 0.015
"""Measured: 24 layers of a GPT, 3,000 ops, 40 s on an H200's host (`bench/gpu.py`)."""
_MOST_VARIANTS = 8
"""Ways to call a segment that are compiled: memory given or not, and numbers, which are the same in most steps."""
_ANY = "any"
"""The key of what runs a segment with all other numbers."""
_MOST_PROCESSES = 16
"""Beyond which compiling is no faster: a few hundred kernels, each of about a second."""
_GAIN = 0.1
"""Share of a step that compilation saved: 12 % of a GPT of 1.4B parameters, 20 % of small ones (same run)."""
_FLOPS_PER_S = 4.5e14
"""What eager steps of that GPT did: a step is taken to last no less than its FLOPs at this rate."""


def pays(plan: Plan, program: Program, device: torch.device, steps: int | None) -> bool:
    """Whether segments are to be compiled: what the plan says, or where the run is long enough to gain from it.

    On processors most models gain nothing (docs/log.md), so there it has to be asked for.
    """
    if plan.compile != "auto":
        return plan.compile != "off"
    if device.type != "cuda" or steps is None:
        return False
    entry = max(program.classes, key=lambda one: sum(segment.num_ops for segment in one.segments.values()))
    ops = sum(segment.num_ops for segment in entry.segments.values())
    flops = sum(segment.flops for segment in entry.segments.values()) * len(program.micro_batches)
    return steps * flops / _FLOPS_PER_S * _GAIN > ops * _SECONDS_PER_OP


def compiled_where_it_pays(
    plan: Plan,
    program: Program,
    device: torch.device,
    steps: int | None = None,
    told: Told | None = None,
    *,
    may_wait: bool = False,
    since: int | None = None,
) -> "CompiledSegments | None":
    """What compiles segments; None where they run as they are written.

    `may_wait`: somebody calls `hear` and `take` between steps, so that steps can go on while segments are compiled.
    By `auto` they do only where nothing is launched as CUDA graphs, which would have to be captured once more.
    `since`: the step from which on they were compiled in the run that this one continues: it is to do as that one did.
    """
    went_on = since is not None and plan.compile == "auto" and device.type == "cuda"
    if not went_on and not pays(plan, program, device, steps):
        return None
    processes = _processes(plan, device)
    beside = plan.compile == "on" or (plan.compile == "auto" and not plan.may_take_graphs)
    waits = may_wait and beside and since is None
    behind = Behind(device, processes) if waits else None
    return CompiledSegments(device, processes, told or _untold, behind, first_step=since)


def _processes(plan: Plan, device: torch.device) -> int:
    """A GPU's kernels are many and small, and cores are idle meanwhile; the host's ranks share them."""
    if device.type != "cuda":
        return 1
    ranks = min(plan.ranks, torch.cuda.device_count())
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_PROCESSES))


def _untold(segment: str, seconds: float, reason: str | None) -> None:
    pass


Compiled = Callable[..., Any] | None
"""What was compiled; None where that cannot be."""


@dataclass(slots=True)
class CompiledSegments:
    """What was compiled so far in this process, by what segments compute."""

    device: torch.device
    processes: int = 1
    """That compile kernels at the same time."""
    told: Told = _untold
    """Called after each attempt."""
    behind: Behind | None = None
    """Compiles while steps run as written; None: a segment is compiled before it is run."""
    step: int = 0
    """The step that is run now."""
    first_step: int | None = None
    """The first that ran with what was compiled behind the steps."""
    _runs: dict[int, tuple[Segment, Run]] = field(default_factory=dict)
    """By identity; the segment is kept so that its id stays its own."""
    _functions: dict[object, Compiled] = field(default_factory=dict)
    _leaves_out: bool = False
    _seconds: float = 0.0
    _waited_s: float = 0.0

    def counted(self) -> dict[str, Any]:
        """What was compiled, what was not, how long that took and steps waited for it, and since when it is used."""
        compiled = sum(function is not None for function in self._functions.values())
        return {
            "segments": compiled,
            "as_written": len(self._functions) - compiled,
            "waiting": 0 if self.behind is None else self.behind.num_waiting,
            "seconds": self._seconds,
            "waited_s": self._seconds if self.behind is None else self._waited_s,
            "first_step": self.first_step,
        }

    def run_of(self, segment: Segment) -> Run:
        """What runs a segment."""
        known = self._runs.get(id(segment))
        if known is None:
            pieces = pieces_of(segment, self.device)
            run = chain(segment, pieces, self._lazily) if len(pieces) > 1 else self._lazily(segment)
            known = self._runs[id(segment)] = (segment, run)
        return known[1]

    def hear(self) -> None:
        """Take note of what was compiled behind the steps."""
        assert self.behind is not None
        for wanted, seconds in self.behind.hear():
            self._seconds += seconds
            self.told(wanted.name, seconds, wanted.reason)

    def take(self, step: int) -> int:
        """Use what was wanted up to `step` and is compiled, in steps from now on; how many graphs these are."""
        assert self.behind is not None
        began = time.perf_counter()
        taken = self.behind.take(step)
        for key, wanted in taken:
            function = None
            if wanted.is_kept:  # to load it takes no time, and processes would take longer to start
                function = self._compile(wanted.name, wanted.graph, wanted.inputs, 1, loads=True)
            elif wanted.reason is None:
                function = self._compile(wanted.name, wanted.graph, wanted.inputs, self.processes)
            self._functions[key] = function
            for put in wanted.puts:
                put(function)
        self._waited_s += time.perf_counter() - began
        return len(taken)

    def _lazily(self, segment: Segment) -> Run:
        if not any(_computes(node) for node in segment.nodes):
            return segment.run
        fills = list(find_fills(segment.nodes, segment.outputs).items())
        text = text_of(segment)
        variants: dict[object, Run] = {}

        def run(args: list[Any], into: Sequence[Tensor | None] = (None,) * len(fills)) -> tuple[Any, ...]:
            which: object = (*[memory is not None for memory in into], *map(_lies, args))
            function = variants.get(which) or variants.get(_ANY)
            if function is None:
                if len(variants) < _MOST_VARIANTS:
                    put = partial(variants.__setitem__, which)
                    function = self._function(segment, text, fills, args, into, put)
                else:
                    which, reason = _ANY, "it takes numbers, or strides, that change from step to step"
                    function = self._as_written(segment, text, reason)
                variants[which] = function
            return function(args, into)

        return run

    def _function(
        self,
        segment: Segment,
        text: object,
        fills: Sequence[tuple[fx.Node, Fill]],
        args: Sequence[Any],
        into: Sequence[Tensor | None],
        put: Callable[[Run], None],
    ) -> Run:
        """What runs a segment, given the like of these; `put` is called with what runs it later, if that is another."""
        filled = [pair for pair, memory in zip(fills, into, strict=True) if memory is not None]
        try:
            given = tuple(map(given_of, args))
            memory = [Like.of(tensor) for tensor in into if tensor is not None]
            graph = graph_of(segment, given, filled, self.device)
        except InductorError as error:
            return self._as_written(segment, text, str(error))
        inputs = [*likes_of(given), *memory]
        key = (text, tuple(tensor is not None for tensor in into), given, *memory)

        def made(compiled: Compiled) -> Run:
            if compiled is None:
                return plain(segment)
            run = with_memory(compiled, segment, filled)
            return tried(run, segment, put, refuse) if is_checked(graph, inputs) else run

        def refuse(reason: str) -> None:
            self._functions[key] = None
            self.told(segment.name, 0.0, reason)

        if key not in self._functions:
            if self.behind is not None:
                wanted = self.behind.want(key, segment.name, graph, inputs, self.step)
                wanted.puts.append(lambda compiled: put(made(compiled)))
                return plain(segment)
            self._functions[key] = self._compile(segment.name, graph, inputs, self.processes)
        return made(self._functions[key])

    def _as_written(self, segment: Segment, text: object, reason: str) -> Run:
        if text not in self._functions:
            self._functions[text] = None
            self.told(segment.name, 0.0, reason)
        return plain(segment)

    def leave_out(self, segment: Segment) -> None:
        """Take note, once, of a program whose shapes vary, of which this is a segment: it runs as written."""
        if not self._leaves_out:
            self._leaves_out = True
            self.told(segment.name, 0.0, "one program serves batches of all sizes, and runs as written")

    def _compile(
        self,
        name: str,
        graph: fx.GraphModule,
        inputs: Sequence[Like],
        processes: int,
        *,
        loads: bool = False,
    ) -> Compiled:
        """`loads`: it lies on disk, and was told of."""
        started = time.perf_counter()
        reason = None
        compiled = None
        try:
            compiled = compile_graph(graph, inputs, decompositions_for(inputs), processes)
        except InductorError as error:
            reason = str(error)
        took = time.perf_counter() - started
        self._seconds += 0.0 if loads else took
        if reason is not None or not loads:
            self.told(name, took, reason)
        return compiled


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _lies(value: Any) -> object:
    """What compiled code takes for granted of an input, beside what a segment says of it: it looks at memory alone."""
    if isinstance(value, Tensor):
        return (value.stride(), value.is_conj(), value.is_neg())
    return tuple(map(_lies, value)) if isinstance(value, (tuple, list)) else value
