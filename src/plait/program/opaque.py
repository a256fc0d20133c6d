"""Programs for models that cannot be captured: the model is one instruction, the rest is as always.

In: the names and shapes of the parameters. Out: a `Program` for plans that train whole models on shares of the batch,
or cut what they hold over `data` (ZeRO): parameters are gathered before the model runs, gradients cut after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plait.job.updates.clip import Clip
from plait.plan.plan import DATA, Plan
from plait.program.check.soundness import check_program
from plait.program.check.written import refuse_written
from plait.program.instructions import Commit, DrawnAt, Load, Opaque
from plait.program.layout import Group, Held, Layout
from plait.program.program import Bucket, Program, RankProgram
from plait.program.value import Value
from plait.program.write.build import StepBuilder
from plait.program.write.compression import notices_of
from plait.program.write.push_pull import SERVERS


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """A parameter or buffer that travels."""

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    """Whether it has a gradient; a buffer has none."""


def compile_opaque(
    plan: Plan,
    parameters: Sequence[ParameterShape],
    sizes: Sequence[int],
    shares: Sequence[tuple[int, ...]],
    *,
    clip: Clip,
    notices: tuple[str, ...],
    buffers: Sequence[str] = (),
    draws: tuple[DrawnAt, ...] = (),
    fixed: float | None = None,
    by_samples: bool = False,
    watched: bool = True,
    written: Sequence[str] = (),
    device: torch.device | None = None,
) -> Program:
    """Each micro-batch eagerly, then the sums, then the update; servers are sent all `buffers`.

    `written`: parameters that the forward writes into.
    """
    refuse_written(plan, written, eagerly=True)
    layout = _layout(plan, parameters)
    builder = StepBuilder(
        plan, _buckets(plan, parameters, layout), layout, clip, device or torch.device("cpu")
    )
    known = {"draws": draws, "fixed": fixed, "by_samples": by_samples, "watched": watched}
    program = Program(
        plan=plan,
        micro_batches=tuple(sizes),
        shares=tuple(shares),
        classes=(_rank(builder, parameters, len(sizes), buffers, known),),
        members=(0,) * plan.mesh.size,
        layout=layout,
        gathered=(),
        notices=notices,
        total_weight=None,
    )
    check_program(program)
    return replace(program, notices=(*notices, *notices_of(program)))


def _layout(plan: Plan, parameters: Sequence[ParameterShape]) -> Layout:
    """Whole parameters on every rank; under ZeRO flat groups in the order in which the model lists them."""
    own = [entry for entry in parameters if entry.value.kind == "parameter"]
    held = {entry.value.name: Held(shape=entry.shape, placements=()) for entry in own}
    layout = Layout(mesh=plan.mesh, axes=(), parameters=held)
    if plan.memory.zero == 0 or plan.data_ranks == 1:
        return layout
    limit, made = plan.sync.bucket_mib * 2**20, list[list[ParameterShape]]()
    room: dict[object, float] = {}
    latest: dict[object, list[ParameterShape]] = {}
    for entry in own:
        key = (entry.dtype, entry.trained)
        if room.get(key, 0.0) <= 0:
            made.append([])
            latest[key], room[key] = made[-1], limit
        latest[key].append(entry)
        room[key] -= _num_bytes(entry)
    groups = [
        Group(
            parameters=tuple(entry.value.name for entry in entries),
            shapes=tuple(entry.shape for entry in entries),
            dtype=entries[0].dtype,
            chunks=plan.data_ranks,
            trained=entries[0].trained,
        )
        for entries in made
    ]
    return replace(layout, groups=tuple(groups), zero=plan.memory.zero)


def _num_bytes(entry: ParameterShape) -> int:
    return torch.Size(entry.shape).numel() * entry.dtype.itemsize


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype in (torch.float64, torch.complex128)


def _buckets(plan: Plan, parameters: Sequence[ParameterShape], layout: Layout) -> tuple[Bucket, ...]:
    """One bucket per dtype, or per group: nothing overlaps with an opaque backward. Buffers travel apart."""
    served = plan.agreement.weights == "server"
    axis = SERVERS if served else DATA if plan.mesh.size > 1 else None
    made = [
        Bucket(parameters=group.parameters, shapes=group.shapes, dtype=group.dtype, axis=DATA, group=group)
        for group in layout.groups
        if group.trained
    ]
    trained = [entry for entry in parameters if entry.trained and entry.value.kind == "parameter"]
    if not made:
        made = [
            Bucket(
                parameters=tuple(entry.value.name for entry in entries),
                shapes=tuple(entry.shape for entry in entries),
                dtype=entries[0].dtype,
                axis=axis,
            )
            for entries in _by_dtype(trained)
        ]
    if axis is not None:  # scalars are never cut nor compressed, nor rounded, nor complex
        dtype = torch.float64 if any(_is_wide(entry.dtype) for entry in trained) else torch.float32
        alike = [index for index, bucket in enumerate(made) if bucket.dtype == dtype]
        if layout.groups or plan.sync.compress != "none" or not alike:
            made.append(Bucket(parameters=(), shapes=(), dtype=dtype, axis=axis, scalars=("total", "weight")))
        else:
            made[alike[0]] = replace(made[alike[0]], scalars=("total", "weight"))
    made += [
        Bucket(
            parameters=(),
            buffers=tuple(entry.value.name for entry in entries),
            shapes=tuple(entry.shape for entry in entries),
            dtype=entries[0].dtype,
            axis=DATA if plan.mesh.size > 1 else None,
        )
        for entries in _by_dtype(entry for entry in parameters if entry.value.kind == "buffer")
    ]
    return tuple(made)


def _by_dtype(entries: Iterable[ParameterShape]) -> list[list[ParameterShape]]:
    found: dict[torch.dtype, list[ParameterShape]] = {}
    for entry in entries:
        found.setdefault(entry.dtype, []).append(entry)
    return list(found.values())


def _rank(
    builder: StepBuilder,
    parameters: Sequence[ParameterShape],
    num_micro: int,
    buffers: Sequence[str],
    known: Mapping[str, Any],
) -> RankProgram:
    buckets, writer, servers = builder.buckets, builder.writer, builder.servers
    if servers is not None:
        trained = [index for index, bucket in enumerate(buckets) if not bucket.buffers]
        servers.pull(trained)
        servers.wait(trained, None)
    held = tuple(entry.value for entry in parameters if entry.value.kind == "parameter")
    for number in range(num_micro):
        writer.add(Load(name=f"load {number}", micro_batch=number))
        if builder.layout.zero == 3 or number == 0:  # what was gathered in the first micro-batch stays
            started = [builder.start_gather(group, number) for group in range(len(builder.layout.groups))]
            for group, instruction in enumerate(started):
                builder.end_gather(group, instruction, number)
        _micro_batch(builder, held, number, known, is_last=number == num_micro - 1)

    def after() -> None:
        for index, bucket in enumerate(buckets):
            if bucket.buffers:
                reads = (Value.bucket(index),) * len(bucket.buffers)
                writer.add(Commit(name="commit buffers", reads=reads, buffers=bucket.buffers))
        if servers is not None and buffers:
            servers.push_buffers(buffers)

    return builder.close(after)


def _micro_batch(
    builder: StepBuilder,
    held: tuple[Value, ...],
    number: int,
    known: Mapping[str, Any],
    *,
    is_last: bool,
) -> None:
    """Gradients into their buckets; buffers change with every micro-batch, and travel after the last one."""
    buckets = builder.buckets
    parameters = tuple(name for bucket in buckets for name in bucket.parameters)
    buffers = tuple(name for bucket in buckets for name in bucket.buffers) if is_last else ()
    scalars = {name: Value.node(name, number) for name in ("total", "weight")}
    builder.writer.add(
        Opaque(
            name="forward and backward, eagerly",
            parameters=parameters,
            buffers=buffers,
            **known,
            micro_batch=number,
            reads=held,
            writes=(
                *scalars.values(),
                *(Value.gradient(name, number) for name in (*parameters, *buffers)),
            ),
        )
    )
    for index, bucket in enumerate(buckets):
        if bucket.buffers and not is_last:
            continue
        carries = bucket.scalars or (
            ("total", "weight") if bucket.axis is None and index == len(buckets) - 1 else ()
        )
        reads = (
            *(Value.gradient(name, number) for name in (*bucket.parameters, *bucket.buffers)),
            *(scalars[name] for name in carries),
        )
        fresh = number == 0 or bool(bucket.buffers)
        builder.gradients.accumulate(index, reads, number, fresh=fresh, send=is_last)
