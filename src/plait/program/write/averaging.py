"""Workers that train on their own and mix in the weights of others now and then.

In: the program of a worker's step, and which fragments of the model are due. Out: the same with what is averaged before
or after it. A mean, and an outer step towards it, flatten weights after the update, sum them over all workers and mix
them in; elastic forces flatten them before the forward, so that their sum, or the center, is on its way while the step
computes. All workers count the same in a mean, also one whose share of a step was empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from plait.plan.plan import DATA, Plan
from plait.program.instructions import (
    Anchor,
    Exchange,
    Flatten,
    Instruction,
    Lookahead,
    Mix,
    Momentum,
)
from plait.program.program import Bucket, Program, Spec, Storage
from plait.program.value import Value
from plait.program.write.frees import with_frees
from plait.program.write.writer import Writer

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Tensors by name: what each is like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat:
    """Tensors that are averaged together."""

    bucket: Bucket
    fragment: int
    """The part of the model that it belongs to."""
    rule: Literal["mean", "outer", "elastic", "share"]
    """`share`: the center takes the worker's share of it, who keeps its own."""


def flats_of(plan: Plan, parameters: Shapes, buffers: Shapes) -> tuple[Flat, ...]:
    """What travels together: parameters by fragment, in their order, each cut by `sync.bucket_mib`; then buffers.

    Elastic averaging leaves buffers to the workers; a center that another rank has takes a mean of them.
    """
    rule, count = plan.agreement.mix, plan.agreement.fragments
    if rule is None:
        return ()
    sizes = {name: _num_bytes(*entry) for name, entry in parameters.items()}
    whole, before = sum(sizes.values()), 0
    by_fragment: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, entry in parameters.items():
        at = before + sizes[name] / 2  # of a tensor on a border, the side that has more of it
        by_fragment[min(int(at * count / max(whole, 1)), count - 1)][name] = entry
        before += sizes[name]
    limit = plan.sync.bucket_mib * 2**20
    found = [
        Flat(bucket=bucket, fragment=fragment, rule=rule)
        for fragment, entries in enumerate(by_fragment)
        for bucket in flat_buckets(entries, limit)
    ]
    if rule != "elastic" or plan.agreement.weights == "center":
        floating = {name: entry for name, entry in buffers.items() if entry[1].is_floating_point}
        kept: Literal["mean", "share"] = "share" if rule == "elastic" else "mean"
        for bucket in flat_buckets(floating, limit):
            bucket = replace(bucket, parameters=(), buffers=bucket.parameters)
            found.append(Flat(bucket=bucket, fragment=count - 1, rule=kept))
    return tuple(found)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def flat_buckets(entries: Shapes, limit: float) -> list[Bucket]:
    """Tensors in their order, by dtype, each flat of about `limit` bytes."""
    groups: list[tuple[torch.dtype, list[str]]] = []
    open_: dict[torch.dtype, tuple[list[str], float]] = {}
    for name, (shape, dtype) in entries.items():
        names, room = open_.get(dtype, ([], 0.0))
        if room <= 0:
            names, room = [], limit
            groups.append((dtype, names))
        names.append(name)
        open_[dtype] = (names, room - _num_bytes(shape, dtype))
    return [
        Bucket(parameters=tuple(names), shapes=tuple(entries[n][0] for n in names), dtype=dtype, axis=DATA)
        for dtype, names in groups
    ]


def with_averaging(program: Program, flats: Sequence[Flat], fragments: Sequence[int]) -> Program:
    """A worker's step with its part in the averages of `fragments`."""
    writer = _Averages(flats, program.plan)
    wanted = [index for index, flat in enumerate(flats) if flat.fragment in fragments]
    (entry,) = program.classes
    body = list(entry.instructions)
    if program.plan.agreement.mix == "elastic":
        writer.elastic(body, wanted)
    else:
        writer.mean(body, wanted)
    values, storages = dict(entry.values), dict(entry.storages)
    for index, flat in enumerate(flats):
        for value in (Value.average(index), Value.sum(index), Value.center(index)):
            values[value] = Spec(kind="parameter", shape=(flat.bucket.num_elements,), dtype=flat.bucket.dtype)
            storages[value] = (Storage(value, flat.bucket.num_bytes),)
    instructions = tuple(with_frees(writer.written.instructions))
    made = replace(
        entry,
        instructions=instructions,
        prologue=_prologue(program.plan, flats, len(instructions)),
        values=values,
        storages=storages,
        averages=tuple(flat.bucket for flat in flats),
    )
    return replace(program, classes=(made,))


def _prologue(plan: Plan, flats: Sequence[Flat], first: int) -> tuple[Instruction, ...]:
    """Where workers keep a center or a momentum, it begins where they do."""
    if plan.agreement.mix == "mean":
        return ()
    reads = tuple(value for flat in flats if flat.rule != "share" for value in flat.bucket.tensors)
    return (Anchor(id=first, name="anchor", reads=reads, center=plan.agreement.keeps_center),)


class _Averages:
    """Writes the instructions around those of a step."""

    def __init__(self, flats: Sequence[Flat], plan: Plan) -> None:
        self.flats = flats
        self.plan = plan
        self.written = Writer()

    def mean(self, body: Sequence[Instruction], wanted: Sequence[int]) -> None:
        """After the update: all flats are on their way before the first one is waited for."""
        self.written.extend(body)
        started = {}
        for index in wanted:
            self._flatten(index)
            started[index] = self._start(index, Value.average(index))
        for index in wanted:
            self._mix(index, started[index])

    def elastic(self, body: Sequence[Instruction], wanted: Sequence[int]) -> None:
        """Weights of before the step travel while it computes, and pull after its update."""
        moving = [index for index, flat in enumerate(self.flats) if flat.rule == "elastic"]
        moving = moving if self.plan.elastic.momentum > 0 else []
        started = {}
        for index in sorted({*moving, *wanted}):
            self._flatten(index)
        for index in wanted:
            started[index] = (
                self._exchange(index)
                if self.plan.agreement.weights == "center"
                else self._start(index, Value.sum(index))
            )
        for index in moving:
            tensors = self.flats[index].bucket.tensors
            self.written.add(
                Lookahead(
                    name=f"look ahead {index}",
                    reads=(Value.average(index), *tensors),
                    writes=tensors,
                    flat=index,
                )
            )
        self.written.extend(body)
        for index in moving:
            tensors = self.flats[index].bucket.tensors
            self.written.add(
                Momentum(name=f"momentum {index}", reads=(Value.average(index), *tensors), flat=index)
            )
        for index in wanted:
            self._mix(index, started[index], own=(Value.average(index),))

    def _flatten(self, index: int) -> None:
        self.written.add(
            Flatten(
                name=f"flatten weights {index}", reads=self.flats[index].bucket.tensors,
                writes=(Value.average(index),), flat=index,
            )
        )  # fmt: skip

    def _start(self, index: int, into: Value) -> int:
        return self.written.all_reduce(
            Value.average(index), DATA, self.flats[index].bucket.num_bytes, what=f"weights {index}", into=into
        )

    def _exchange(self, index: int) -> int:
        flat = self.flats[index]
        assert flat.rule == "elastic" or flat.rule == "share"
        return self.written.add(
            Exchange(
                name=f"exchange weights {index}", flat=index, reads=(Value.average(index),),
                writes=(Value.center(index),), num_bytes=2 * flat.bucket.num_bytes, rule=flat.rule,
            )
        )  # fmt: skip

    def _mix(self, index: int, started: int, own: tuple[Value, ...] = ()) -> None:
        flat, total = self.flats[index], self.written.instructions[started].writes
        self.written.wait(started, f"weights {index}")
        if flat.rule != "share":
            self.written.add(
                Mix(
                    name=f"mix weights {index}", reads=(*total, *own), writes=flat.bucket.tensors, flat=index,
                    rule=flat.rule,
                )
            )  # fmt: skip
