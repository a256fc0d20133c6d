"""Naming the user's line when a captured step fails.

In: what a segment raised, or the tensors that it made. Out: a `StepError` that tells the op, the user's own file and
line, the module, the micro-batch and its samples; never generated code. It computes only after a failure, or where
asked to look for NaN: then a second, slower pass over a segment follows each line of its plain function as it runs.
"""

import linecache
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.errors import OutcomeError, StepError
from plait.graph.ops.ending import IMPLEMENTATIONS as ENDINGS
from plait.graph.ops.island import IMPLEMENTATIONS as ISLANDS
from plait.graph.ops.island import Island, named
from plait.program.instructions import Compute, Opaque
from plait.program.program import Segment
from plait.program.value import Value
from plait.run.eager.origins import Origin, Origins, origin_of
from plait.run.interpret.step import Step
from plait.torch_private.ops import OpOverload

_SHOWN_IDS = 8
"""Samples that a message names before it counts the rest: they fit one line of a terminal."""
_SHOWN_MODULES = 4
"""The same for modules, whose paths are longer."""
_GENERATED = "<plait segment "
"""How the files of generated functions begin (`program/segment/codegen.py`)."""
_KERNEL = re.compile(r"kernel, \S+:\d+, ")
"""Where in generated code a compiled kernel noticed it."""
_OF_NUMBERS = "keep what goes into that line in range: clamp it, add an epsilon, or lower the learning rate."
Plain = Callable[[], tuple[Any, ...]]
"""Runs a segment once more as it is written, on the same inputs; what it makes is dropped."""


def blame(error: BaseException, step: Step, rank: int, instruction: Compute, plain: Plain) -> StepError:
    """What to raise in place of what a segment raised."""
    segment = step.own.segments[instruction.segment]
    found = _failed(error, segment)
    if found is None:  # compiled code has no lines of nodes
        try:
            plain()
        except Exception as again:  # the same, or that inputs are gone: then modules are all that is known
            found = _failed(again, segment)
            error = again if found is not None else error  # which is told in words of the op
    fix = _fix(error) if found is not None else f"{_fix(error)} With compile=off the line itself is named."
    node, operands = found if found is not None else (None, "")
    if (own := _island(node)) is not None:
        inside = _within(own, origin_of(error, own.module))
        return _error(_failure(inside.told(), error), step, rank, node, instruction, _fix(error), inside)
    return _error(_failure(_told(node, segment, operands), error), step, rank, node, instruction, fix)


def blame_outcome(error: OutcomeError, step: Step, rank: int, instruction: Compute) -> StepError:
    """What to raise where the user's code raises at a value, which a graph knows of the whole micro-batch at once."""
    line = re.search(r"\((\S+:\d+)", error.what)
    place = Origin(line=line[1], module=None) if line is not None else None
    number, what = instruction.micro_batch, error.what
    if number is not None and number < len(step.shares) and len(step.shares[number].sizes) > 1:
        what += "; this is asked of the whole micro-batch, and other ranks have the rest of its samples"
    return _error(what, step, rank, None, instruction, error.fix or _fix(error), place)


def blame_code(
    error: BaseException, step: Step, rank: int, instruction: Opaque, model: nn.Module
) -> StepError:
    """What to raise in place of what the user's own code raised, run eagerly."""
    place = origin_of(error, model)
    return _error(_failure(place.told(), error), step, rank, None, instruction, _fix(error), place)


def find_nan_in_code(
    step: Step, rank: int, instruction: Opaque, results: Sequence[Any], again: Callable[[], Origin | None]
) -> None:
    """Raise where the user's own code, run eagerly, made NaN; `again` runs it once more to see where."""
    if not any(map(_has_nan, results)) or _ids(step, instruction.micro_batch or 0) == ():
        return
    place = again()
    what = f"{place.told()} made NaN of numbers" if place is not None else "the model or its loss gives NaN"
    raise _error(what, step, rank, None, instruction, _OF_NUMBERS, place)


def _within(own: Island, place: Origin) -> Origin:
    """A place in an island, whose modules are named from there."""
    return replace(place, module=f"{own.path}.{place.module}".rstrip(".") if place.module else own.path)


def _failure(told: str, error: BaseException) -> str:
    said = _KERNEL.sub("", str(error).strip()) or "it says nothing more"
    return f"{told} failed: {type(error).__name__}: {said}"


def _island(node: fx.Node | None) -> Island | None:
    """The module that a node runs eagerly, if it does."""
    if node is None or node.target not in {*ISLANDS, *ENDINGS}:
        return None
    return named(next(entry for entry in node.args if isinstance(entry, str)))


def find_nan(step: Step, rank: int, instruction: Compute, results: Sequence[Any], plain: Plain) -> None:
    """Raise where a segment made NaN, naming the first op that made what came out of numbers."""
    number = instruction.micro_batch
    if not any(map(_has_nan, results)) or (number is not None and _ids(step, number) == ()):
        return
    segment = step.own.segments[instruction.segment]
    nodes = {node.name: node for node in segment.nodes}
    bad: dict[str, str] = {}
    """What has NaN, in order, with what went into it."""

    def computed(name: str, local: dict[str, Any]) -> None:
        if name in nodes and not _is_empty(nodes[name]) and _has_nan(local[name]):
            bad[name] = _operands(nodes[name], local)

    def started(local: dict[str, Any]) -> None:
        bad.update((name, "") for name in segment.inputs if _has_nan(local[name]))

    _followed(plain, started, computed)
    name = _first(bad, nodes, segment.outputs)
    if name in segment.inputs:
        value = instruction.reads[segment.inputs.index(name)]
        what = f"NaN came in with {_input(value)}: no op on this rank made it in this step"
        fix = "look at these samples, or at the step before: its update may have been too large."
        raise _error(what, step, rank, None, instruction, fix)
    told, place = _told(nodes.get(name), segment, bad.get(name, "")), None
    if (own := _island(nodes.get(name))) is not None:
        with torch.autograd.set_detect_anomaly(True, check_nan=False), Origins(own.module) as origins:
            place = origins.of(plain())
        place = _within(own, place) if place is not None else None
        told = place.told() if place is not None else told
    what = f"{told} made NaN of numbers"
    raise _error(what, step, rank, nodes.get(name), instruction, _OF_NUMBERS, place)


def _first(bad: Iterable[str], nodes: Mapping[str, fx.Node], outputs: Sequence[str]) -> str:
    """The first of `bad`, in order, that has no bad source and leads to an output through bad ones; empty: none."""
    known, waiting = set(bad), list(outputs)
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in known and name not in reached:
            reached.add(name)
            waiting += [source.name for source in _sources(nodes.get(name))]
    made = (n for n in bad if not any(source.name in known for source in _sources(nodes.get(n))))
    return next((name for name in made if name in reached), "")  # none: compiled code alone made it


def _sources(node: fx.Node | None) -> list[fx.Node]:
    return node.all_input_nodes if node is not None else []


def _followed(
    plain: Plain, started: Callable[[dict[str, Any]], None], computed: Callable[[str, dict[str, Any]], None]
) -> None:
    """Run a segment's own function, told of its inputs once they have names, and of each node once it is there."""

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_GENERATED):
            return None
        before = frame.f_lineno

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "line":
                name = _name_at(frame, before)
                if name.startswith("["):  # inputs, or memory for outputs
                    started(frame.f_locals)
                elif name:
                    computed(name, frame.f_locals)
                before = frame.f_lineno
            return line

        return line

    traced = sys.gettrace()
    sys.settrace(enter)
    try:
        plain()
    finally:
        sys.settrace(traced)


def _name_at(frame: FrameType, number: int) -> str:
    """What a line of generated code assigns to; empty where it assigns nothing."""
    name, equals, _ = linecache.getline(frame.f_code.co_filename, number).partition(" = ")
    return name.strip() if equals else ""


def _failed(error: BaseException, segment: Segment) -> tuple[fx.Node, str] | None:
    """The node whose line of generated code raised, and what went into it."""
    nodes = {node.name: node for node in segment.nodes}
    link: TracebackType | None = error.__traceback__
    while link is not None:
        if link.tb_frame.f_code.co_filename.startswith(_GENERATED):
            node = nodes.get(_name_at(link.tb_frame, link.tb_lineno))
            return (node, _operands(node, link.tb_frame.f_locals)) if node is not None else None
        link = link.tb_next
    return None


def _operands(node: fx.Node, local: dict[str, Any]) -> str:
    tensors = [local.get(source.name) for source in node.all_input_nodes]
    shapes = [
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors if isinstance(t, Tensor)
    ]
    return f" of {', '.join(shapes)}" if shapes else ""


def _told(node: fx.Node | None, segment: Segment, operands: str) -> str:
    if node is None:
        modules = list(dict.fromkeys(node.meta.get("module", "") for node in segment.nodes))
        named = [module for module in modules if module]
        some = ", ".join(named[:_SHOWN_MODULES]) + (", ..." if len(named) > _SHOWN_MODULES else "")
        return f"the {segment.phase} of {some or 'the model'}"
    name = (
        str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "an op")
    )
    name = "indexing" if node.target is operator.getitem else name
    op = name.removesuffix(".default").rpartition("::")[2].removeprefix("aten.").removeprefix("plait.")
    behind = "the backward of " if node.meta.get("phase") == "backward" else ""
    source, module = node.meta.get("source", ""), node.meta.get("module", "")
    inside = f" in module {module}" if module else ""
    if not source:
        return f"{behind}{op}{operands}{inside}"
    file, _, number = source.rpartition(":")
    text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
    return f"{source}{inside}: {f'`{text}`: ' if text else ''}{behind}{op}{operands}"


def _error(
    what: str,
    step: Step,
    rank: int,
    node: fx.Node | None,
    instruction: Compute | Opaque,
    fix: str,
    inside: Origin | None = None,
) -> StepError:
    number = instruction.micro_batch
    ids = _ids(step, number) if number is not None else None
    place = f"step {step.number + 1}, rank {rank}"
    if number is not None:
        place += f", micro-batch {number}"
    if ids:
        shown = ", ".join(map(str, ids[:_SHOWN_IDS]))
        place += f", samples {shown}" + (f", ... ({len(ids)} in all)" if len(ids) > _SHOWN_IDS else "")
    meta = node.meta if node is not None else {}
    return StepError(
        f"{what}\n({place})",
        where=inside.line if inside is not None else meta.get("source") or None,
        module=inside.module if inside is not None else meta.get("module") or None,
        step=step.number,
        micro_batch=number,
        ids=ids or (),
        op=str(node.target) if node is not None else None,
        fix=fix,
    )


def _ids(step: Step, micro_batch: int) -> tuple[int, ...] | None:
    """This rank's samples; None where it has no shares of its own."""
    return step.shares[micro_batch].ids if micro_batch < len(step.shares) else None


def _fix(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "use a smaller batch, more accumulation, memory.recompute, or a plan that cuts the model."
    if "CUDA error" in str(error):
        return "a GPU may tell late: run with CUDA_LAUNCH_BLOCKING=1 to see the line itself, or with --device cpu."
    if "index" in str(error).lower() and "out of" in str(error).lower():
        return "look at these samples: an index is negative, or as large as the table that it looks up in."
    return "mend that line, or look at what these samples give it."


def _has_nan(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_nan, value))
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _is_empty(node: fx.Node) -> bool:
    """Memory that is filled later, with anything in it."""
    return "empty" in str(node.target)


def _input(value: Value) -> str:
    match value.kind:
        case "batch":
            return f"tensor {value.number} of the batch"
        case "parameter" | "buffer":
            return f"{value.kind} {value.name}"
        case _:
            return f"{value}"
