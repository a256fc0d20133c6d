"""Programs for models that cannot be captured: the model is one instruction, the rest is as always.

In: the names and shapes of the parameters. Out: a `Program` for replicated plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from plait.plan.plan import DATA, Plan
from plait.program.check.soundness import check_program
from plait.program.instructions import (
    Accumulate,
    Collective,
    Commit,
    Finish,
    Instruction,
    Load,
    Opaque,
    Update,
    Wait,
)
from plait.program.layout import Layout
from plait.program.program import Bucket, Program, RankProgram
from plait.program.write.compression import CompressedSums, is_compressed, notices_of
from plait.program.write.frees import with_frees
from plait.program.write.push_pull import SERVERS, ServerSide


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShape:
    """A parameter (or `buffer:name`) that travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def compile_opaque(
    plan: Plan,
    parameters: Sequence[ParameterShape],
    sizes: Sequence[int],
    shares: Sequence[tuple[int, ...]],
    *,
    clip_norm: float | None,
    notices: tuple[str, ...],
    buffers: Sequence[str] = (),
) -> Program:
    """Each micro-batch eagerly, then the sums, then the update; servers are sent all `buffers`."""
    buckets = _buckets(plan, parameters)
    order = [name for bucket in buckets for name in bucket.parameters]
    program = Program(
        plan=plan,
        micro_batches=tuple(sizes),
        shares=tuple(shares),
        classes=(_rank(plan, buckets, order, len(sizes), clip_norm, buffers),),
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
    axis = DATA if plan.mesh.size > 1 else SERVERS if plan.sync.has_servers else None
    groups: dict[tuple[torch.dtype, bool], list[ParameterShape]] = {}
    for entry in parameters:
        groups.setdefault((entry.dtype, entry.name.startswith("buffer:")), []).append(entry)
    made = []
    for index, ((dtype, is_buffers), entries) in enumerate(
        sorted(groups.items(), key=lambda item: item[0][1])
    ):
        made.append(
            Bucket(
                parameters=tuple(entry.name for entry in entries),
                shapes=tuple(entry.shape for entry in entries),
                dtype=dtype,
                axis=SERVERS if plan.sync.has_servers and not is_buffers else axis,
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
    order: list[str],
    num_micro: int,
    clip_norm: float | None,
    buffers: Sequence[str],
) -> RankProgram:
    instructions: list[Instruction] = []

    def add(cls: Any, name: str, kind: str, **fields: Any) -> int:
        instructions.append(cls(id=len(instructions), name=name, kind=kind, **fields))
        return len(instructions) - 1

    servers = ServerSide(buckets, add) if plan.sync.has_servers else None
    if servers is not None:
        trained = [index for index, bucket in enumerate(buckets) if not _is_buffers(bucket)]
        servers.pull(trained)
        servers.wait(trained, None)
    for number in range(num_micro):
        add(Load, f"load {number}", "data", micro_batch=number)
        is_last = (
            number == num_micro - 1
        )  # buffers change with every micro-batch, and travel after the last one
        wanted = [name for name in order if is_last or not name.startswith("buffer:")]
        writes = {name: f"{number}/gradient:{name}" for name in wanted}
        add(
            Opaque, "forward and backward, eagerly", "backward", parameters=tuple(wanted), micro_batch=number,
            writes=(f"{number}/total", f"{number}/weight", *writes.values()),
        )  # fmt: skip
        for index, bucket in enumerate(buckets):
            if _is_buffers(bucket) and not is_last:
                continue
            carries = bucket.scalars or (
                ("total", "weight") if bucket.axis is None and index == len(buckets) - 1 else ()
            )
            reads = (*(writes[name] for name in bucket.parameters), *(f"{number}/{name}" for name in carries))
            add(
                Accumulate, f"bucket {index}", "backward", reads=reads, writes=(f"bucket:{index}",), bucket=index,
                fresh=number == 0 or _is_buffers(bucket), micro_batch=number,
            )  # fmt: skip
    compressed = CompressedSums(plan, add)
    for index, bucket in enumerate(buckets):
        if servers is not None and bucket.axis == SERVERS:
            servers.push(index, None)
        elif is_compressed(plan, bucket):
            compressed.send(index, bucket, None)
        elif bucket.axis is not None:
            name = f"bucket:{index}"
            started = add(
                Collective, f"all_reduce {name}", "communication", lane="communication", op="all_reduce",
                axis=bucket.axis, reads=(name,), writes=(name,), num_bytes=bucket.num_bytes,
            )  # fmt: skip
            add(Wait, f"wait for {name}", "wait", of=started, reads=(name,), writes=(name,))
    compressed.settle()
    names = tuple(f"bucket:{index}" for index in range(len(buckets)))
    if servers is not None:
        servers.finish(late_weight=True)
    else:
        add(
            Finish, "finish gradients", "update", reads=names, writes=("total", "weight"), late_weight=True,
            clip_norm=clip_norm,
        )  # fmt: skip
        add(Update, "update", "update", reads=names)
    for index, bucket in enumerate(buckets):
        if _is_buffers(bucket):
            held = tuple(name.removeprefix("buffer:") for name in bucket.parameters)
            add(Commit, "commit buffers", "update", reads=(f"bucket:{index}",) * len(held), buffers=held)
    if servers is not None and buffers:
        servers.push_buffers(buffers)
    return RankProgram(
        instructions=tuple(with_frees(instructions)), buckets=buckets, segments={}, values={}, constants={}
    )


def _is_buffers(bucket: Bucket) -> bool:
    return bool(bucket.parameters) and all(name.startswith("buffer:") for name in bucket.parameters)
