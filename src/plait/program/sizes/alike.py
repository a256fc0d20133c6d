"""Programs of one step at several sizes, as one program that takes the sizes.

In: programs that were compiled at points of a few sizes. Out: the first of them with a `Sized` in each class of ranks;
or the reason why they are not alike; or a point at which one more program is needed to know. Every number that differs
must be a function of the sizes (`form.py`), and every other thing must be equal.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from plait.program.program import Program, RankProgram, Segment, Spec
from plait.program.segment.codegen import with_numbers
from plait.program.sized import At, Sized
from plait.program.sizes.form import Form, MorePoints, Point, Range, find
from plait.program.value import Value

_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.])")


class NotAlikeError(Exception):
    """Programs of two sizes differ by more than numbers that are functions of the sizes."""


def unify(
    programs: Sequence[Program],
    points: Sequence[Point],
    variables: tuple[tuple[int, int], ...],
    domain: Sequence[Range],
) -> Program | MorePoints:
    """The first program, as one for all sizes of `domain`."""
    first = programs[0]
    for other in programs[1:]:
        if (other.members, other.layout, other.shares) != (first.members, first.layout, first.shares):
            raise NotAlikeError("ranks have other parts of the work")
    classes = []
    for index, entry in enumerate(first.classes):
        numbers = _Numbers(points, domain)
        parts = _parts([program.classes[index] for program in programs], numbers)
        if numbers.unclear is not None:
            return MorePoints(numbers.unclear)
        table, source = numbers.table()
        runs = {name: with_numbers(entry.segments[name], text) for name, text in parts.sources.items()}
        sized = Sized(
            variables=variables, table=table, source=source, sources=parts.sources, runs=runs,
            fields=parts.fields, shapes=parts.shapes,
        )  # fmt: skip
        classes.append(replace(entry, sized=sized))
    return replace(first, classes=tuple(classes))


@dataclass(frozen=True, slots=True)
class _Parts:
    """What differs, with `At` (in sources: `n[...]`) for numbers."""

    sources: Mapping[str, str]
    fields: Mapping[int, Mapping[str, Any]]
    shapes: Mapping[Value, tuple[tuple[Any, ...], tuple[Any, ...]]]


class _Numbers:
    """The table under way."""

    def __init__(self, points: Sequence[Point], domain: Sequence[Range]) -> None:
        self._points, self._domain = points, domain
        self._index: dict[tuple[object, ...], At] = {}
        self._texts: list[str] = []
        self.unclear: Point | None = None

    def entry(self, values: Sequence[Any]) -> Any:
        """The value where all are equal, else its place in the table."""
        if all(value == values[0] and type(value) is type(values[0]) for value in values):
            return values[0]
        key = (type(values[0]), *values)  # 2 and 2.0 are equal
        if key not in self._index:
            self._texts.append(self._text(values))
            self._index[key] = At(len(self._texts) - 1)
        return self._index[key]

    def _text(self, values: Sequence[Any]) -> str:
        names = [f"v{i}" for i in range(len(self._points[0]))]
        if all(isinstance(value, int) for value in values):
            return self._form(values).text(names)
        if all(isinstance(value, float) and value for value in values):
            whole = [round(value) for value in values]
            if all(float(a) == b for a, b in zip(whole, values, strict=True)):
                return f"float({self._form(whole).text(names)})"
            whole = [round(1 / value) for value in values]
            if all(a and 1.0 / a == b for a, b in zip(whole, values, strict=True)):
                return f"1.0 / ({self._form(whole).text(names)})"
        raise NotAlikeError(f"a number is {_listed(values)} at sizes {_listed(self._points)}")

    def _form(self, values: Sequence[int]) -> Form:
        found = find(self._points, values, self._domain)
        if found is None:
            raise NotAlikeError(f"a number is {_listed(values)} at sizes {_listed(self._points)}")
        if isinstance(found, MorePoints):
            self.unclear = found.point
            return Form((), 0, 1)
        return found

    def table(self) -> tuple[Callable[..., tuple[Any, ...]], str]:
        """The function from sizes to numbers."""
        names = ", ".join(f"v{i}" for i in range(len(self._points[0])))
        body = "".join(f"        {text},\n" for text in self._texts)
        source = f"def table({names}):\n    return (\n{body}    )\n"
        if not self._texts:
            source = f"def table({names}):\n    return ()\n"
        scope: dict[str, Any] = {}
        exec(compile(source, "<plait sizes>", "exec"), scope)
        return scope["table"], source


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(
        str(value[0] if isinstance(value, tuple) and len(value) == 1 else value) for value in values
    )


def _parts(entries: Sequence[RankProgram], numbers: _Numbers) -> _Parts:
    first = entries[0]
    for other in entries[1:]:
        _same(first, other)
    return _Parts(
        sources={
            name: text
            for name in first.segments
            if (text := _source([entry.segments[name] for entry in entries], numbers)) is not None
        },
        fields=_instructions(entries, numbers),
        shapes=_shapes(entries, numbers),
    )


def _same(first: RankProgram, other: RankProgram) -> None:
    """All but what numbers may change."""
    if (other.buckets, other.averages) != (first.buckets, first.averages):
        raise NotAlikeError("gradients travel in other buckets")
    _same_keys(first.segments, other.segments, "segments")
    _same_keys(first.values, other.values, "values")
    _same_constants(first, other)


def _same_keys(a: Mapping[Any, Any], b: Mapping[Any, Any], what: str) -> None:
    if a.keys() != b.keys():
        raise NotAlikeError(f"they have other {what}: {', '.join(sorted(map(str, a.keys() ^ b.keys()))[:4])}")


def _same_constants(first: RankProgram, other: RankProgram) -> None:
    _same_keys(first.constants, other.constants, "constants")
    for name, tensor in first.constants.items():
        found = other.constants[name]
        if tensor.shape != found.shape or not torch.equal(tensor, found):
            raise NotAlikeError(f"the constant tensor {name} depends on the size")


def _source(segments: Sequence[Segment], numbers: _Numbers) -> str | None:
    """The source with `n[...]` for numbers that differ; None where none does."""
    first = segments[0]
    for other in segments[1:]:
        _same_segment(first, other)
    if all(other.source == first.source for other in segments):
        return None
    skeletons = [_NUMBER.split(segment.source) for segment in segments]
    for other_skeleton in skeletons[1:]:
        if other_skeleton != skeletons[0]:
            a, b = next(
                (p, q)
                for p, q in zip(first.source.splitlines(), _lines(segments, skeletons), strict=False)
                if p != q
            )
            raise NotAlikeError(f"an op differs: {a.strip()[:100]} and {b.strip()[:100]}")
    literals = zip(*(_NUMBER.findall(segment.source) for segment in segments), strict=True)
    parts = [skeletons[0][0]]
    for literal, after in zip(literals, skeletons[0][1:], strict=True):
        entry = numbers.entry([_value(text) for text in literal])
        parts += [f"n[{entry.index}]" if isinstance(entry, At) else literal[0], after]
    return "".join(parts)


def _lines(segments: Sequence[Segment], skeletons: Sequence[list[str]]) -> list[str]:
    different = next(s for s, skeleton in zip(segments, skeletons, strict=True) if skeleton != skeletons[0])
    return different.source.splitlines()


def _value(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _same_segment(first: Segment, other: Segment) -> None:
    """What goes in and out, and what the sources name besides tensors: functions and settings of ops."""
    if (other.inputs, other.outputs, other.fillable) != (first.inputs, first.outputs, first.fillable):
        raise NotAlikeError(f"segment {first.name} has other inputs or outputs")
    ours, theirs = first.run.__globals__, other.run.__globals__
    for name, value in ours.items():
        if name.startswith(("c_", "f_")) and (name not in theirs or theirs[name] != value):
            raise NotAlikeError(f"{name} differs in segment {first.name}")


def _instructions(entries: Sequence[RankProgram], numbers: _Numbers) -> dict[int, dict[str, Any]]:
    first = entries[0].instructions
    if any(len(entry.instructions) != len(first) for entry in entries):
        raise NotAlikeError("they have other instructions")
    found: dict[int, dict[str, Any]] = {}
    for position, versions in enumerate(zip(*(entry.instructions for entry in entries), strict=True)):
        if any(type(version) is not type(versions[0]) for version in versions):
            raise NotAlikeError(f"instruction {position} differs: {versions[0].name} and {versions[-1].name}")
        if all(version == versions[0] for version in versions):
            continue
        if versions[0].micro_batch is None:
            raise NotAlikeError(f"instruction {versions[0].name} of the step depends on the size")
        for field in fields(versions[0]):
            values = [getattr(version, field.name) for version in versions]
            if any(value != values[0] for value in values):
                found.setdefault(position, {})[field.name] = _placed(values, numbers)
    return found


def _placed(values: Sequence[Any], numbers: _Numbers) -> Any:
    if all(isinstance(value, tuple) and len(value) == len(values[0]) for value in values):
        return tuple(_placed(column, numbers) for column in zip(*values, strict=True))
    if all(isinstance(value, int | float) for value in values):
        return numbers.entry(values)
    if any(value != values[0] for value in values):
        raise NotAlikeError(f"{values[0]} and {next(v for v in values if v != values[0])} differ")
    return values[0]


def _shapes(
    entries: Sequence[RankProgram], numbers: _Numbers
) -> dict[Value, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    found = {}
    for name, first in entries[0].values.items():
        versions: list[Spec] = [entry.values[name] for entry in entries]
        if all(version == first for version in versions):
            continue
        if any(
            (v.kind, v.dtype, len(v.shape)) != (first.kind, first.dtype, len(first.shape)) for v in versions
        ):
            raise NotAlikeError(f"value {name} is of another kind")
        found[name] = (
            _placed([v.shape for v in versions], numbers),
            _placed([v.strides for v in versions], numbers),
        )
    return found
