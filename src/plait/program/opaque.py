"""Programs for models that cannot be captured: the model is one instruction, the rest is as always.

In: the names and shapes of the parameters. Out: a `Program` for replicated plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from plait.job.updates.clip import Clip
from plait.plan.plan import DATA, Plan
from plait.program.check.soundness import check_program
from plait.program.instructions import (
    Accumulate,
    Commit,
    Finish,
    Load,
    Opaque,
    Update,
)
from plait.program.layout import Layout
from plait.program.program import Bucket, Program, RankProgram
from plait.program.value import TOTAL, WEIGHT, Value
from plait.program.write.compression import CompressedSums, is_compressed, notices_of
from plait.program.write.frees import with_frees
from plait.program.write.push_pull import SERVERS, ServerSide
from plait.program.write.writer import Writer


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """A parameter or buffer that travels."""

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype


def compile_opaque(
    plan: Plan,
    parameters: Sequence[ParameterShape],
    sizes: Sequence[int],
    shares: Sequence[tuple[int, ...]],
    *,
    clip: Clip,
    notices: tuple[str, ...],
    buffers: Sequence[str] = (),
) -> Program:
    """Each micro-batch eagerly, then the sums, then the update; servers are sent all `buffers`."""
    buckets = _buckets(plan, parameters)
    program = Program(
        plan=plan,
        micro_batches=tuple(sizes),
        shares=tuple(shares),
        classes=(_rank(plan, buckets, len(sizes), clip, buffers),),
        members=(0,) * plan.mesh.size,
        layout=Layout(mesh=plan.mesh, axes=(), parameters={}),
        gathered=(),
        notices=notices,
        total_weight=None,
    )
    check_program(program)
    return replace(program, notices=(*notices, *notices_of(program)))


def _buckets(plan: Plan, parameters: Sequence[ParameterShape]) -> tuple[Bucket, ...]:
    """One bucket per dtype: nothing overlaps with an opaque backward. Buffers travel apart from gradients."""
    axis = DATA if plan.mesh.size > 1 else SERVERS if plan.agreement.weights == "server" else None
    groups: dict[tuple[torch.dtype, bool], list[ParameterShape]] = {}
    for entry in parameters:
        groups.setdefault((entry.dtype, entry.value.kind == "buffer"), []).append(entry)
    made = []
    for index, ((dtype, is_buffers), entries) in enumerate(
        sorted(groups.items(), key=lambda item: item[0][1])
    ):
        made.append(
            Bucket(
                parameters=tuple(entry.value.name for entry in entries if not is_buffers),
                buffers=tuple(entry.value.name for entry in entries if is_buffers),
                shapes=tuple(entry.shape for entry in entries),
                dtype=dtype,
                axis=SERVERS if plan.agreement.weights == "server" and not is_buffers else axis,
                scalars=("total", "weight") if axis is not None and index == 0 else (),
            )
        )
    if axis is not None and plan.sync.compress != "none":  # scalars are never compressed
        scalars = replace(made[0], parameters=(), shapes=())
        made = [replace(made[0], scalars=()), *made[1:], scalars]
    return tuple(made)


def _rank(
    plan: Plan,
    buckets: tuple[Bucket, ...],
    num_micro: int,
    clip: Clip,
    buffers: Sequence[str],
) -> RankProgram:
    writer = Writer()
    servers = ServerSide(buckets, writer) if plan.agreement.weights == "server" else None
    if servers is not None:
        trained = [index for index, bucket in enumerate(buckets) if not bucket.buffers]
        servers.pull(trained)
        servers.wait(trained, None)
    for number in range(num_micro):
        writer.add(Load(name=f"load {number}", micro_batch=number))
        _micro_batch(writer, buckets, number, is_last=number == num_micro - 1)
    compressed = CompressedSums(plan, writer)
    for index, bucket in enumerate(buckets):
        if servers is not None and bucket.axis == SERVERS:
            servers.push(index, None)
        elif is_compressed(plan, bucket):
            compressed.send(index, bucket, None)
        elif bucket.axis is not None:
            value = Value.bucket(index)
            writer.wait(writer.all_reduce(value, bucket.axis, bucket.num_bytes), value)
    compressed.settle()
    names = tuple(map(Value.bucket, range(len(buckets))))
    if servers is not None:
        servers.finish(late_weight=True)
    else:
        writer.add(
            Finish(
                name="finish gradients",
                reads=names,
                writes=(TOTAL, WEIGHT),
                late_weight=True,
                clip=clip,
            )
        )
        writer.add(Update(name="update", reads=names))
    for index, bucket in enumerate(buckets):
        if bucket.buffers:
            reads = (Value.bucket(index),) * len(bucket.buffers)
            writer.add(Commit(name="commit buffers", reads=reads, buffers=bucket.buffers))
    if servers is not None and buffers:
        servers.push_buffers(buffers)
    return RankProgram(
        instructions=tuple(with_frees(writer.instructions)),
        buckets=buckets,
        segments={},
        values={},
        constants={},
    )


def _micro_batch(writer: Writer, buckets: tuple[Bucket, ...], number: int, *, is_last: bool) -> None:
    """Gradients into their buckets; buffers change with every micro-batch, and travel after the last one."""
    parameters = tuple(name for bucket in buckets for name in bucket.parameters)
    buffers = tuple(name for bucket in buckets for name in bucket.buffers) if is_last else ()
    scalars = {name: Value.node(name, number) for name in ("total", "weight")}
    writer.add(
        Opaque(
            name="forward and backward, eagerly",
            parameters=parameters,
            buffers=buffers,
            micro_batch=number,
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
        writer.add(
            Accumulate(
                name=f"bucket {index}", reads=reads, writes=(Value.bucket(index),), bucket=index,
                fresh=number == 0 or bool(bucket.buffers), micro_batch=number,
            )
        )  # fmt: skip
