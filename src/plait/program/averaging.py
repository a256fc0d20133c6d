"""Workers that train on their own and mix in the weights of others now and then: local-sgd, diloco, easgd.

In: the program of a worker's step, and which fragments of the model are due. Out: the same with what is averaged before
or after it. local-sgd and diloco flatten weights after the update, sum them over all workers and mix them in; easgd
flattens them before the forward, so that their sum, or the center, is on its way while the step computes. All workers
count the same in a mean, also one whose share of a step was empty. What is due depends on the number of the step alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from plait.plan.plan import DATA, Plan
from plait.program.check.soundness import check_program
from plait.program.instructions import (
    Exchange,
    Flatten,
    Instruction,
    Lookahead,
    Mix,
    Momentum,
    Serve,
)
from plait.program.program import Bucket, Program, RankProgram, Spec, Storage
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


def mixes(plan: Plan) -> bool:
    """Whether workers of a plan update weights of their own, and mix in those of others now and then."""
    return plan.sync.rule in ("local-sgd", "diloco", "easgd")


def averages(plan: Plan) -> bool:
    """Whether they do so all at once; else each by itself, with a center that another rank has."""
    return mixes(plan) and not has_center(plan)


def has_center(plan: Plan) -> bool:
    """Whether a rank beside the workers has the center."""
    return plan.sync.rule == "easgd" and plan.elastic.variant != "sync"


def due(plan: Plan, step: int, ends_epoch: bool) -> tuple[int, ...]:
    """The fragments of the model that are mixed in a step; which ones depends on its number alone.

    Of a worker that takes steps as they come, the number counts its own.
    """
    if not mixes(plan):
        return ()
    done = step + 1
    if plan.sync.rule == "easgd":
        return (0,) if done % plan.elastic.tau == 0 else ()
    every, count = plan.average.every, plan.average.fragments
    everything = tuple(range(count))
    if plan.sync.rule == "local-sgd" and step < plan.average.warmup:
        return everything
    if every == "epoch":
        return everything if ends_epoch else ()
    return tuple(k for k in everything if done % every == ((k + 1) * every // count) % every)


def longest_round(plan: Plan) -> int | None:
    """Steps after which all ranks have met at least once, whatever step it is; None: they meet once an epoch."""
    if not mixes(plan):
        return 1
    if plan.sync.rule == "easgd":
        return plan.elastic.tau
    return None if plan.average.every == "epoch" else plan.average.every


def flats_of(plan: Plan, parameters: Shapes, buffers: Shapes) -> tuple[Flat, ...]:
    """What travels together: parameters by fragment, in their order, each cut by `sync.bucket_mib`; then buffers.

    Elastic averaging leaves buffers to the workers; a center that another rank has takes a mean of them.
    """
    rule: Literal["mean", "outer", "elastic"] = "mean"
    if plan.sync.rule != "local-sgd":
        rule = "outer" if plan.sync.rule == "diloco" else "elastic"
    count = plan.average.fragments if rule != "elastic" else 1
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
        for bucket in _buckets(entries, limit)
    ]
    if rule != "elastic" or has_center(plan):
        floating = {name: entry for name, entry in buffers.items() if entry[1].is_floating_point}
        kept: Literal["mean", "share"] = "share" if rule == "elastic" else "mean"
        for bucket in _buckets(floating, limit):
            bucket = replace(bucket, parameters=(), buffers=bucket.parameters)
            found.append(Flat(bucket=bucket, fragment=count - 1, rule=kept))
    return tuple(found)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _buckets(entries: Shapes, limit: float) -> list[Bucket]:
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
    if program.plan.sync.rule == "easgd":
        writer.elastic(body, wanted)
    else:
        writer.mean(body, wanted)
    values, storages = dict(entry.values), dict(entry.storages)
    for index, flat in enumerate(flats):
        for value in (Value.average(index), Value.sum(index), Value.center(index)):
            values[value] = Spec(kind="parameter", shape=(flat.bucket.num_elements,), dtype=flat.bucket.dtype)
            storages[value] = (Storage(value, flat.bucket.num_bytes),)
    made = replace(
        entry,
        instructions=tuple(with_frees(writer.written.instructions)),
        values=values,
        storages=storages,
        averages=tuple(flat.bucket for flat in flats),
    )
    program = replace(program, classes=(made,))
    check_program(program)
    return _with_center(program) if has_center(program.plan) else program


def _with_center(program: Program) -> Program:
    """With what the rank does that has the center: one instruction for the whole run."""
    serve = Serve(id=0, name="serve", order=(), buffers=())
    (worker,) = program.classes
    center = RankProgram(
        instructions=(serve,), buckets=(), segments={}, values={}, constants={}, averages=worker.averages
    )
    return replace(program, server=center)


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
                self._exchange(index) if has_center(self.plan) else self._start(index, Value.sum(index))
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
