"""Evaluates the groups of a schedule in order, and differentiates them in the opposite order.

In: a schedule, traced functions for its families, parameters and inputs. Out: the states of all vertices, in rows.
The backward of a group goes only as far as the states that it saw; what the parameters get is computed afterwards, for
all groups of a family at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.dynamic.rows import Part, RowFunction
from plait.dynamic.schedule import Family, Group, Schedule

Values = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is evaluated."""

    schedule: Schedule
    functions: Mapping[Family, RowFunction]
    parameters: tuple[str, ...]
    """Names of the parameters that are given, in order."""
    states: tuple[Tensor, ...]
    """An example of each state."""


@dataclass(slots=True)
class _Kin:
    """A family's values while a batch is evaluated."""

    function: RowFunction
    whole: Values
    """Of all its rows, and what has no rows: parameters, inputs, results of `before`."""
    kept: dict[int, Values] = field(default_factory=dict)
    """Of one group each, by its first row."""

    def given(self, group: Group, local: Values) -> Values:
        """What the graphs of a level can ask for."""
        rows = slice(group.within, group.within + group.num_rows)
        return _Sliced(self.whole, self.function.by_row, rows, local)


class _Sliced(dict[str, Tensor]):
    """Values of one group; those of all rows are cut to its own."""

    def __init__(self, whole: Values, by_row: frozenset[str], rows: slice, local: Values) -> None:
        super().__init__(local)
        self._whole, self._by_row, self._rows = whole, by_row, rows

    def __missing__(self, name: str) -> Tensor:
        value = self._whole[name]
        return value[self._rows] if name in self._by_row else value


def states_of(work: Work, parameters: Sequence[Tensor], inputs: Tensor | None) -> tuple[Tensor, ...]:
    """The states of all vertices, one tensor for each of `work.states`, in the schedule's rows."""
    given = () if inputs is None else (inputs,)
    out: tuple[Tensor, ...] = _Evaluation.apply(work, *parameters, *given)
    return out


class _Evaluation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(work.parameters)
        parameters = dict(zip(work.parameters, tensors[:count], strict=True))
        inputs = tensors[count] if len(tensors) > count else None
        buffers, kin = _forward(work, parameters, inputs, keeps=any(ctx.needs_input_grad))
        ctx.work, ctx.kin, ctx.shapes = work, kin, [t.shape for t in tensors]
        return buffers

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        work: Work = ctx.work
        by_parameter, of_inputs = _backward(work, ctx.kin, grads, ctx.shapes[len(work.parameters) :])
        ctx.kin = None
        found = [by_parameter.get(name) for name in work.parameters]
        return (None, *found, *((of_inputs,) if len(ctx.shapes) > len(work.parameters) else ()))


def _run(part: Part, num_rows: int, values: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    return part.run(num_rows, *[values[name] for name in part.inputs])


def _forward(
    work: Work, parameters: Values, inputs: Tensor | None, *, keeps: bool
) -> tuple[tuple[Tensor, ...], dict[Family, _Kin]]:
    number = work.schedule.num_vertices
    buffers = tuple(like.new_empty((number, *like.shape)) for like in work.states)
    kin = {family: _begun(work, family, parameters, inputs) for family in work.schedule.rows}
    for group in work.schedule.groups:
        own = kin[group.family]
        rows = slice(group.within, group.within + group.num_rows)
        sizes = (group.num_rows * group.family.num_children,)
        for name, buffer in zip(own.function.states, buffers, strict=True):
            flat = own.whole[name][rows].view(*sizes, *buffer.shape[1:])
            torch.index_select(buffer, 0, group.children, out=flat)
        values = own.given(group, {})
        made = dict(zip(own.function.forward.outputs, _run(own.function.forward, group.num_rows, values), strict=True))
        values.update(made)
        for name, buffer in zip(own.function.out, buffers, strict=True):
            buffer[group.start : group.start + group.num_rows] = values[name]
        if keeps:
            own.kept[group.start] = made
    return buffers, kin


def _begun(work: Work, family: Family, parameters: Values, inputs: Tensor | None) -> _Kin:
    """A family with what needs no state, and room for what its rows will see."""
    function = work.functions[family]
    whole = dict(zip(function.parameters, parameters.values(), strict=True))
    if function.inputs:
        assert inputs is not None
        whole[function.inputs[0]] = inputs.index_select(0, work.schedule.inputs[family])
    number = len(work.schedule.rows[family])
    made = _run(function.before, number, whole)
    whole |= dict(zip(function.before.outputs, made, strict=True))
    for name, like in zip(function.states, work.states, strict=True):
        whole[name] = like.new_empty((number, family.num_children, *like.shape))
    return _Kin(function=function, whole=whole)


def _backward(
    work: Work, kin: dict[Family, _Kin], grads: Sequence[Tensor], shapes: Sequence[torch.Size]
) -> tuple[Values, Tensor | None]:
    flows = [grad.clone(memory_format=torch.contiguous_format) for grad in grads]
    kept: dict[Family, dict[str, list[Tensor]]] = {family: {} for family in kin}
    for group in reversed(work.schedule.groups):
        own = kin[group.family]
        function = own.function
        here = [flow[group.start : group.start + group.num_rows] for flow in flows]
        local = own.kept.pop(group.start) | dict(zip(function.grads, here, strict=True))
        values = own.given(group, local)
        made = dict(zip(function.backward.outputs, _run(function.backward, group.num_rows, values), strict=True))
        for flow, name in zip(flows, function.passed, strict=True):
            if name is not None and group.family.num_children:
                flow.index_add_(0, group.children, made[name].reshape(-1, *flow.shape[1:]))
        for name in function.after.inputs:
            if (value := made.get(name, local.get(name))) is not None and name not in function.grads:
                kept[group.family].setdefault(name, []).append(value)

    of_inputs: Tensor | None = None
    by_parameter: Values = {}
    for family, own in kin.items():
        function, rows = own.function, work.schedule.rows[family]
        values = own.whole | {name: torch.cat(parts[::-1]) for name, parts in kept[family].items()}
        values |= {name: flow.index_select(0, rows) for name, flow in zip(function.grads, flows, strict=True)}
        found = dict(zip(function.after.outputs, _run(function.after, len(rows), values), strict=True))
        names = dict(zip(function.parameters, work.parameters, strict=True))
        for leaf, gradient in function.trained:
            value = found[gradient]
            if leaf in names:
                known = by_parameter.get(names[leaf])
                by_parameter[names[leaf]] = value if known is None else known.add_(value)
            else:
                of_inputs = value.new_zeros(shapes[0]) if of_inputs is None else of_inputs
                of_inputs.index_add_(0, work.schedule.inputs[family], value)
    return by_parameter, of_inputs
