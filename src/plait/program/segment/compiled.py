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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops import batch_norm, gelu, scaled
from plait.graph.ops.product_into import PRODUCT_INTO, WIDE_PRODUCT
from plait.plan.plan import Plan
from plait.program.program import Program, Segment
from plait.program.segment.codegen import Fill, find_fills
from plait.program.segment.layers import Run, chain, pieces_of, text_of
from plait.torch_private.inductor import InductorError, compile_graph

_DECOMPOSITIONS = {**batch_norm.DECOMPOSITIONS, **scaled.IMPLEMENTATIONS}
"""Ops of our own that Inductor may look into."""
_ON_GPUS = {**_DECOMPOSITIONS, **gelu.DECOMPOSITIONS}
"""The same, and ops that are better for a GPU than as torch decomposes them."""
Told = Callable[[str, float, str | None], None]
"""(segment, seconds it took to compile, why it could not be)."""


_SECONDS_PER_OP = 0.015
"""Measured: 24 layers of a GPT, 3,000 ops, 40 s on an H200's host (`bench/gpu.py`)."""
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
        return plan.compile == "on"
    if device.type != "cuda" or steps is None:
        return False
    entry = max(program.classes, key=lambda one: sum(segment.num_ops for segment in one.segments.values()))
    ops = sum(segment.num_ops for segment in entry.segments.values())
    flops = sum(segment.flops for segment in entry.segments.values()) * len(program.micro_batches)
    return steps * flops / _FLOPS_PER_S * _GAIN > ops * _SECONDS_PER_OP


def compiled_where_it_pays(
    plan: Plan, program: Program, device: torch.device, steps: int | None = None, told: Told | None = None
) -> "CompiledSegments | None":
    """What compiles segments as they are first run; None where they run as they are written."""
    if not pays(plan, program, device, steps):
        return None
    return CompiledSegments(device, _processes(plan, device), told or _untold)


def _processes(plan: Plan, device: torch.device) -> int:
    """A GPU's kernels are many and small, and cores are idle meanwhile; the host's ranks share them."""
    if device.type != "cuda":
        return 1
    ranks = min(plan.ranks, torch.cuda.device_count())
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_PROCESSES))


def _untold(segment: str, seconds: float, reason: str | None) -> None:
    pass


@dataclass(slots=True)
class CompiledSegments:
    """What was compiled so far in this process, by what segments compute."""

    device: torch.device
    processes: int = 1
    """That compile kernels at the same time."""
    told: Told = _untold
    """Called after each attempt."""
    _runs: dict[int, tuple[Segment, Run]] = field(default_factory=dict)
    """By identity; the segment is kept so that its id stays its own."""
    _functions: dict[object, Callable[..., Any] | None] = field(default_factory=dict)
    _seconds: float = 0.0

    def counted(self) -> dict[str, float]:
        """What was compiled, what was not, and how long that took."""
        compiled = sum(function is not None for function in self._functions.values())
        return {
            "segments": compiled,
            "as_written": len(self._functions) - compiled,
            "seconds": self._seconds,
        }

    def run_of(self, segment: Segment) -> Run:
        """What runs a segment."""
        known = self._runs.get(id(segment))
        if known is None:
            pieces = pieces_of(segment, self.device)
            run = chain(segment, pieces, self._lazily) if len(pieces) > 1 else self._lazily(segment)
            known = self._runs[id(segment)] = (segment, run)
        return known[1]

    def _lazily(self, segment: Segment) -> Run:
        if not any(_computes(node) for node in segment.nodes):
            return segment.run
        fills = list(find_fills(segment.nodes, segment.outputs).items())
        text = text_of(segment)
        variants: dict[tuple[bool, ...], Run] = {}

        def run(args: list[Any], into: Sequence[Tensor | None] = (None,) * len(fills)) -> tuple[Any, ...]:
            given = tuple(memory is not None for memory in into)
            function = variants.get(given)
            if function is None:
                function = variants[given] = self._function(segment, text, fills, args, into)
            return function(args, into)

        return run

    def _function(
        self,
        segment: Segment,
        text: object,
        fills: Sequence[tuple[fx.Node, Fill]],
        args: Sequence[Any],
        into: Sequence[Tensor | None],
    ) -> Run:
        filled = [pair for pair, memory in zip(fills, into, strict=True) if memory is not None]
        inputs = [*args, *(memory for memory in into if memory is not None)]
        key = (
            text,
            tuple(position for position, memory in enumerate(into) if memory is not None),
            *map(_meta, inputs),
        )
        if key not in self._functions:
            self._functions[key] = self._compile(segment, filled, inputs)
        compiled = self._functions[key]
        if compiled is None:
            return segment.run if segment.fillable else lambda args, into: segment.run(args)
        return _with_memory(compiled, segment, filled)

    def _compile(
        self, segment: Segment, filled: Sequence[tuple[fx.Node, Fill]], inputs: Sequence[Any]
    ) -> Callable[..., Any] | None:
        started = time.perf_counter()
        reason = None
        compiled = None
        if not all(isinstance(value, Tensor) for value in inputs):
            reason = "it takes numbers that change from step to step"
        else:
            graph = graph_of(segment, filled, self.device)
            ours = _ON_GPUS if self.device.type == "cuda" else _DECOMPOSITIONS
            try:
                compiled = compile_graph(graph, inputs, ours, self.processes)
            except InductorError as error:
                reason = str(error)
        took = time.perf_counter() - started
        self._seconds += took
        self.told(segment.name, took, reason)
        return compiled


def _with_memory(
    compiled: Callable[..., Any], segment: Segment, filled: Sequence[tuple[fx.Node, Fill]]
) -> Run:
    """Call what was compiled with the caller's memory behind the inputs, and put that back among the outputs."""
    written = {segment.outputs.index(fill.output): place for place, (_, fill) in enumerate(filled)}
    if not written:

        def plain(args: list[Any], into: Sequence[Tensor | None] = ()) -> tuple[Any, ...]:
            taken = list(args)
            args.clear()
            return tuple(compiled(taken))

        return plain
    order = range(len(segment.outputs))

    def fill(args: list[Any], into: Sequence[Tensor | None]) -> tuple[Any, ...]:
        memory = [tensor for tensor in into if tensor is not None]
        taken = [*args, *memory]
        args.clear()
        results = iter(compiled(taken))
        return tuple(memory[written[index]] if index in written else next(results) for index in order)

    return fill


def graph_of(
    segment: Segment, filled: Sequence[tuple[fx.Node, Fill]], device: torch.device
) -> fx.GraphModule:
    """The segment alone, on `device`; outputs that are written to given memory are inputs at the end instead."""
    graph, copies = fx.Graph(), dict[str, fx.Node]()
    for name in segment.inputs:
        copies[name] = graph.placeholder(name)
    memory = {node: graph.placeholder(f"{fill.output}_into") for node, fill in filled}
    skipped = {fill.output for _, fill in filled}
    by_fill = dict(filled)
    dropped = _between(by_fill)
    wide = find_wide(segment, by_fill) if device.type == "cuda" else {}
    widened = set(wide.values())
    for node in segment.nodes:
        if node in by_fill:
            into: Any = memory[node]
            if by_fill[node].shape is not None:
                into = graph.call_function(
                    torch.ops.aten.view.default, (into, list(by_fill[node].shape or ()))
                )
            if by_fill[node].transposed:
                into = graph.call_function(torch.ops.aten.t.default, (into,))
            operands = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            graph.call_function(PRODUCT_INTO, (*operands, into))
        elif node in widened:
            copies[node.name] = copies[node.all_input_nodes[0].name]
        elif node in wide:
            factors = [copies[arg.name] for arg in node.args if isinstance(arg, fx.Node)]
            copies[node.name] = graph.call_function(_WIDE[node.target], tuple(factors))
        elif node not in dropped:
            copies[node.name] = copied = graph.node_copy(node, lambda entry: copies[entry.name])
            if isinstance(copied.kwargs.get("device"), torch.device):
                copied.kwargs = {**copied.kwargs, "device": device}
    graph.output(tuple(copies[name] for name in segment.outputs if name not in skipped))
    return fx.GraphModule(torch.nn.Module(), graph)


def find_wide(segment: Segment, filled: Mapping[fx.Node, Fill]) -> dict[fx.Node, fx.Node]:
    """Products in 16 bits that are, maybe through views, gradients in float32 and nothing else; the cast of each."""
    found = {}
    inside = set(segment.nodes)
    for cast in segment.nodes:
        if cast.target is not torch.ops.aten._to_copy.default or cast.meta["val"].dtype != torch.float32:
            continue
        if any(user.op != "output" for user in cast.users):  # else the cast is fused with what reads it
            continue
        source = cast.args[0]
        while isinstance(source, fx.Node) and source in inside and len(source.users) == 1:
            if source.target in _WIDE and source not in filled:
                if source.meta["val"].dtype == torch.bfloat16 and source.name not in segment.outputs:
                    found[source] = cast
                break
            if source.target not in _VIEWS or source.name in segment.outputs:
                break
            source = source.args[0]
    return found


_WIDE: Mapping[Any, Any] = {
    torch.ops.aten.mm.default: WIDE_PRODUCT,
    scaled.SCALED_GRADIENT: scaled.WIDE_GRADIENT,
}
"""Products that may give float32 themselves."""
_VIEWS = (torch.ops.aten.t.default, torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def _between(filled: Mapping[fx.Node, Fill]) -> set[fx.Node]:
    """Views that lead from a filled product to its output."""
    found: set[fx.Node] = set()
    for node, fill in filled.items():
        current = node
        while current.name != fill.output:
            current = next(iter(current.users))
            found.add(current)
    return found


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _meta(value: Any) -> object:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return type(value)
