"""Evaluates groups of rows in order, and differentiates them in the opposite order.

In: groups, each of rows of one traced function, with where the states that they see are and where their own go;
parameters and inputs. Out: the states of all rows. The backward of a group goes only as far as the states that it saw;
what the parameters get is computed afterwards, for all groups of a family at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.dynamic.row_graphs import RowFunction, RowGraph

Values = dict[str, Tensor]
Family = Any
"""What rows have in common that one function serves with buffers of one shape."""
Rows = Tensor | slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that are evaluated at once."""

    family: Family
    within: int
    """Its first row among those of its family."""
    num_rows: int
    seen: tuple[tuple[int, Rows], ...]
    """For each state that its function sees: the buffer, and which of its rows, one row after the other."""
    into: tuple[tuple[int, int], ...]
    """For each state that it makes: the buffer, and the first of the rows where it goes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is evaluated."""

    groups: tuple[Group, ...]
    functions: Mapping[Family, RowFunction]
    num_rows: Mapping[Family, int]
    buffers: tuple[tuple[int, Tensor], ...]
    """For each buffer its rows, and an example of one."""
    read: tuple[tuple[int, int], ...] | None = None
    """(buffer, row) of what a loss may read; None: everything. What it cannot depend on gets no gradient, not zeros."""


@dataclass(slots=True)
class _Kin:
    """A family's values while a batch is evaluated."""

    function: RowFunction
    whole: Values
    """Of all its rows, and what has no rows: parameters, inputs, results of `before`."""
    kept: dict[int, Values] = field(default_factory=dict)
    """Of one group each, by its first row."""


class _Given(dict[str, Tensor]):
    """What the graphs of a level can ask for: values of one group; those of all rows are cut to its own."""

    def __init__(self, kin: _Kin, group: Group, local: Values) -> None:
        super().__init__(local)
        self._kin, self._rows = kin, slice(group.within, group.within + group.num_rows)

    def __missing__(self, name: str) -> Tensor:
        value = self._kin.whole[name]
        return value[self._rows] if name in self._kin.function.by_row else value


def evaluated(
    work: Work, parameters: Mapping[str, Tensor], inputs: Mapping[Family, Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """The buffers, filled. `inputs` are those of all rows of a family, in the order of its groups."""
    families = tuple(family for family in work.num_rows if inputs.get(family))
    counts = tuple(len(inputs[family]) for family in families)
    given = [value for family in families for value in inputs[family]]
    names = tuple(parameters)
    apply: Any = _Evaluation.apply
    groups = _on_device(work)
    out: tuple[Tensor, ...] = apply(work, groups, (names, families, counts), *parameters.values(), *given)
    return out


class _Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: Work, groups: Sequence[Group], names: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        known, families, counts = names
        parameters = dict(zip(known, tensors, strict=False))
        rest = iter(tensors[len(known) :])
        inputs = {
            family: [next(rest) for _ in range(count)] for family, count in zip(families, counts, strict=True)
        }
        buffers, kin = _forward(work, groups, parameters, inputs, keeps=any(ctx.needs_input_grad))
        ctx.work, ctx.groups, ctx.kin, ctx.names = work, groups, kin, names
        ctx.mark_non_differentiable(*(b for b in buffers if not (b.is_floating_point() or b.is_complex())))
        return buffers

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        known, families, counts = ctx.names
        by_parameter, by_input = _backward(ctx.work, ctx.groups, ctx.kin, grads)
        ctx.kin = None
        of_inputs = [
            by_input.get((f, i)) for f, count in zip(families, counts, strict=True) for i in range(count)
        ]
        return (None, None, None, *(by_parameter.get(name) for name in known), *of_inputs)


def _on_device(work: Work) -> tuple[Group, ...]:
    """The groups with their rows where the buffers are: all of them in one transfer."""
    device = next((like.device for _, like in work.buffers), torch.device("cpu"))
    rows = {id(r): r for group in work.groups for _, r in group.seen if isinstance(r, Tensor)}
    if device.type == "cpu" or not rows:
        return work.groups
    moved = torch.split(torch.cat(list(rows.values())).to(device), [len(r) for r in rows.values()])
    there = dict(zip(rows, moved, strict=True))
    return tuple(
        replace(group, seen=tuple((buffer, there.get(id(r), r)) for buffer, r in group.seen))
        for group in work.groups
    )


def _run(part: RowGraph, num_rows: int, values: Mapping[str, Tensor]) -> Values:
    return dict(zip(part.outputs, part.run(num_rows, *[values[name] for name in part.inputs]), strict=True))


def _forward(
    work: Work,
    groups: Sequence[Group],
    parameters: Values,
    inputs: Mapping[Family, Sequence[Tensor]],
    *,
    keeps: bool,
) -> tuple[tuple[Tensor, ...], dict[Family, _Kin]]:
    buffers = tuple(like.new_empty((number, *like.shape)) for number, like in work.buffers)
    kin = {family: _begun(work, family, parameters, inputs.get(family, ())) for family in work.num_rows}
    for group in groups:
        own = kin[group.family]
        function = own.function
        local: Values = {}
        for name, (buffer, rows) in zip(function.states, group.seen, strict=True):
            local[name] = _seen(own.whole.get(name), buffers[buffer], rows, group, function.others)
        made = _run(function.forward, group.num_rows, _Given(own, group, local))
        for name, (buffer, start) in zip(function.out, group.into, strict=True):
            value = made[name] if name in made else _Given(own, group, local)[name]
            buffers[buffer][start : start + group.num_rows] = value
        if keeps:
            own.kept[group.within] = local | made
    return buffers, kin


def _seen(room: Tensor | None, buffer: Tensor, rows: Rows, group: Group, others: bool) -> Tensor:
    """States that a group sees, in the family's room for them if it has one."""
    shape = (group.num_rows, -1, *buffer.shape[1:]) if others else (group.num_rows, *buffer.shape[1:])
    if room is None:
        found = buffer[rows] if isinstance(rows, slice) else buffer.index_select(0, rows)
        return found.view(shape)
    here = room[group.within : group.within + group.num_rows]
    flat = here.view(-1, *buffer.shape[1:])
    if isinstance(rows, slice):
        flat.copy_(buffer[rows])
    else:
        torch.index_select(buffer, 0, rows, out=flat)
    return here


def _begun(work: Work, family: Family, parameters: Values, inputs: Sequence[Tensor]) -> _Kin:
    """A family with what needs no state, and room for those states that are needed of all rows at once."""
    function, number = work.functions[family], work.num_rows[family]
    whole = {value: parameters[name] for name, value in function.parameters.items()}
    whole |= dict(zip(function.inputs, inputs, strict=True))
    whole |= _run(function.before, number, whole)
    example = next(group for group in work.groups if group.family == family)
    for name, (buffer, rows) in zip(function.states, example.seen, strict=True):
        if name in function.after.inputs:
            like = work.buffers[buffer][1]
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            others = (count // example.num_rows,) if function.others else ()
            whole[name] = like.new_empty((number, *others, *like.shape))
    return _Kin(function=function, whole=whole)


def _reached(work: Work) -> list[Family]:
    """The families with rows that a loss can depend on, through gradients."""
    reached = [torch.full((number,), work.read is None) for number, _ in work.buffers]
    for buffer, row in work.read or ():
        reached[buffer][row] = True
    families: dict[Family, None] = {}
    for group in reversed(work.groups):
        function = work.functions[group.family]
        if any(
            name is not None and bool(reached[buffer][start : start + group.num_rows].any())
            for name, (buffer, start) in zip(function.grads, group.into, strict=True)
        ):
            families[group.family] = None
            for name, (buffer, rows) in zip(function.passed, group.seen, strict=True):
                if name is not None:
                    reached[buffer][rows] = True
    return list(families)


def _backward(
    work: Work, groups: Sequence[Group], kin: dict[Family, _Kin], grads: Sequence[Tensor]
) -> tuple[Values, dict[tuple[Family, int], Tensor]]:
    flows = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
    kept: dict[Family, dict[str, list[Tensor]]] = {family: {} for family in _reached(work)}
    for group in reversed(groups):
        if group.family not in kept:
            continue
        own = kin[group.family]
        function = own.function
        local = own.kept.pop(group.within)
        for name, (buffer, start) in zip(function.grads, group.into, strict=True):
            if name is not None:
                local[name] = flows[buffer][start : start + group.num_rows]
        made = _run(function.backward, group.num_rows, _Given(own, group, local))
        for name, (buffer, rows) in zip(function.passed, group.seen, strict=True):
            if name is None:
                continue
            flow, made_here = flows[buffer], made[name].reshape(-1, *flows[buffer].shape[1:])
            if isinstance(rows, slice):
                flow[rows] += made_here
            elif len(rows):
                passes = made_here.untyped_storage().data_ptr() == flow.untyped_storage().data_ptr()
                flow.index_add_(0, rows, made_here.clone() if passes else made_here)
        for name in function.after.inputs:
            if name not in own.whole:
                kept[group.family].setdefault(name, []).append(made[name] if name in made else local[name])

    by_parameter: Values = {}
    by_input: dict[tuple[Family, int], Tensor] = {}
    for family in kept:
        own = kin[family]
        function = own.function
        values = own.whole | {name: torch.cat(parts[::-1]) for name, parts in kept[family].items()}
        found = _run(function.after, work.num_rows[family], values)
        named = {value: name for name, value in function.parameters.items()}
        for leaf, gradient in function.trained:
            value = found[gradient]
            if leaf in named:
                known = by_parameter.get(named[leaf])
                by_parameter[named[leaf]] = value if known is None else known.add_(value)
            else:
                by_input[family, function.inputs.index(leaf)] = value
    return by_parameter, by_input
