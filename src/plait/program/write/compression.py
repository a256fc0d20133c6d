"""What is sent of a bucket whose gradients are compressed, and the instructions that send it.

In: a bucket, the plan's settings. Out: instructions in place of its all-reduce: `Compress`, collectives, `Decompress`.
Only gradients are compressed: the scalars of a step have a bucket of their own. Methods: fp16 and bf16 cast and sum;
powersgd sums the two factors of each matrix, first the left ones and then the right ones (Vogels et al. 2019, algorithm
1); topk gathers the largest values of every rank. What powersgd and topk do not send is added to the next step's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from plait.errors import ProgramError
from plait.plan.decisions import Sync
from plait.plan.plan import Plan
from plait.program.instructions import (
    Accumulate,
    Collective,
    Compress,
    Decompress,
    Finish,
    Instruction,
)
from plait.program.program import Bucket, Program, RankProgram, Spec, Storage
from plait.program.value import Value
from plait.program.write.writer import Writer
from plait.units import format_bytes

INDEX = torch.int32
"""Of topk's places in a bucket."""
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A gradient that powersgd approximates."""

    position: int
    """In the bucket."""
    rows: int
    columns: int
    """All dims but the first."""
    rank: int
    """Columns of its factors."""


def matrices(bucket: Bucket, rank: int) -> tuple[Matrix, ...]:
    """The gradients of a bucket that are larger than their factors; the others travel whole, with the left factors."""
    found = []
    for position, shape in enumerate(bucket.shapes):
        count = torch.Size(shape).numel()
        if len(shape) < 2 or count == 0:
            continue
        rows, columns = shape[0], count // shape[0]
        if rank * (rows + columns) < count:
            found.append(Matrix(position=position, rows=rows, columns=columns, rank=rank))
    return tuple(found)


def num_kept(bucket: Bucket, keep: float) -> int:
    """Values of a bucket that topk sends."""
    return max(1, round(keep * bucket.num_elements))


def is_compressed(plan: Plan, bucket: Bucket) -> bool:
    """Whether a bucket travels compressed: those of gradients, not of scalars or buffers."""
    return plan.sync.compress != "none" and bucket.axis is not None and bool(bucket.parameters)


def messages(bucket: Bucket, sync: Sync) -> tuple[Spec, ...]:
    """What a rank sends of a bucket, message by message."""
    if sync.compress in CASTS:
        return (_spec(bucket.num_elements, CASTS[sync.compress]),)
    if sync.compress == "topk":
        kept = num_kept(bucket, sync.compress_keep)
        return (_spec(kept * (bucket.dtype.itemsize + INDEX.itemsize), torch.uint8),)
    cut = matrices(bucket, sync.compress_rank)
    whole = bucket.num_elements - sum(matrix.rows * matrix.columns for matrix in cut)
    left = _spec(whole + sum(matrix.rows * matrix.rank for matrix in cut), bucket.dtype)
    right = _spec(sum(matrix.columns * matrix.rank for matrix in cut), bucket.dtype)
    return (left, right) if cut else (left,)


def bytes_sent(bucket: Bucket, sync: Sync, ranks: int) -> int:
    """Bytes that the collectives of a compressed bucket name: of topk, what all ranks send."""
    own = sum(value.num_bytes for value in messages(bucket, sync))
    return own * ranks if sync.compress == "topk" else own


@dataclass(slots=True)
class Travelling:
    """A compressed bucket under way."""

    index: int
    bucket: Bucket
    micro_batch: int | None
    parts: tuple[Spec, ...]
    started: list[int]
    """Ids of the collectives so far."""

    def sent(self, part: int) -> Value:
        """What a message is made from."""
        return Value.packed(self.index, part)


class CompressedSums:
    """Writes the instructions that sum compressed buckets: `send`, `go_on` with the second message, `settle`."""

    def __init__(
        self,
        plan: Plan,
        writer: Writer,
        values: dict[Value, Spec] | None = None,
        storages: dict[Value, tuple[Storage, ...]] | None = None,
    ) -> None:
        self._plan, self._writer = plan, writer
        self._values = values if values is not None else {}
        self._storages = storages if storages is not None else {}
        self._under_way: list[Travelling] = []

    def send(self, index: int, bucket: Bucket, micro_batch: int | None) -> None:
        """Start to sum a bucket; the one before it moves on meanwhile."""
        parts = messages(bucket, self._plan.sync)
        travelling = Travelling(index, bucket, micro_batch, parts, [])
        self._send(travelling, reads=(Value.bucket(index),))
        for other in self._under_way:
            self._go_on(other)
        self._under_way.append(travelling)
        if not self._plan.sync.overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for all that is under way, and turn it back into gradients."""
        for travelling in self._under_way:
            self._go_on(travelling)
        for travelling in self._under_way:
            self._wait(travelling)
            index = travelling.index
            reads = [self._sum(travelling, part) for part in range(len(travelling.parts))]
            self._writer.add(
                Decompress(
                    name=f"decompress bucket {index}", bucket=index,
                    reads=tuple(reads), writes=(Value.bucket(index),),
                )
            )  # fmt: skip
        self._under_way.clear()

    def _send(self, travelling: Travelling, reads: tuple[Value, ...]) -> None:
        part, sync, index = len(travelling.started), self._plan.sync, travelling.index
        value, spec = travelling.sent(part), travelling.parts[part]
        self._describe(value, spec)
        self._writer.add(
            Compress(
                name=f"compress bucket {index}" + (f", part {part}" if part else ""), bucket=index,
                part=part, reads=reads, writes=(value,), micro_batch=travelling.micro_batch,
            )
        )  # fmt: skip
        assert travelling.bucket.axis is not None
        ranks = self._plan.mesh.size_of(travelling.bucket.axis)
        gathers = sync.compress == "topk"
        to = self._sum(travelling, part)
        if gathers:
            self._describe(to, _spec(spec.shape[0] * ranks, spec.dtype))
        op: Literal["all_gather", "all_reduce"] = "all_gather" if gathers else "all_reduce"
        travelling.started.append(
            self._writer.add(
                Collective(
                    name=f"{op} {value}", op=op, axis=travelling.bucket.axis,
                    extents=(spec.shape[0],) * ranks if gathers else (), reads=(value,), writes=(to,),
                    micro_batch=travelling.micro_batch, num_bytes=spec.num_bytes * (ranks if gathers else 1),
                )
            )
        )  # fmt: skip

    def _go_on(self, travelling: Travelling) -> None:
        """Send the second message of a bucket that has one and whose first is under way."""
        if len(travelling.started) < len(travelling.parts):
            self._wait(travelling)
            self._send(travelling, reads=(Value.bucket(travelling.index), travelling.sent(0)))

    def _wait(self, travelling: Travelling) -> None:
        total = self._sum(travelling, len(travelling.started) - 1)
        self._writer.wait(travelling.started[-1], total, travelling.micro_batch)

    def _sum(self, travelling: Travelling, part: int) -> Value:
        gathers = self._plan.sync.compress == "topk"
        return Value.gathered(travelling.index) if gathers else travelling.sent(part)

    def _describe(self, value: Value, spec: Spec) -> None:
        self._values[value] = spec
        self._storages[value] = (Storage(value, spec.num_bytes),)


def check_compressed(entry: RankProgram, index: int, sync: Sync, filled: Sequence[Instruction]) -> None:
    """Raise where a compressed bucket is not filled, sent message by message, and turned back once, in this order."""
    bucket, name = entry.buckets[index], Value.bucket(index)
    own = [i for i in entry.instructions if isinstance(i, Compress | Decompress) and i.bucket == index]
    sent = [
        i
        for i in entry.instructions
        if isinstance(i, Collective) and (i.reads[0].kind, i.reads[0].number) == ("packed", index)
    ]
    parts = messages(bucket, sync)
    expected: list[Any] = [*range(len(parts)), "back"]
    if [i.part if isinstance(i, Compress) else "back" for i in own] != expected or len(sent) != len(parts):
        raise ProgramError(
            f"{name} must be compressed and sent in {len(parts)} parts and turned back once; there are "
            f"{len(sent)} messages and: {', '.join(i.name for i in own)}."
        )
    last = max((i.id for i in filled if isinstance(i, Accumulate)), default=-1)
    finish = next(i.id for i in entry.instructions if isinstance(i, Finish))
    order = [last, *(place for pair in zip(own, sent, strict=False) for place in (pair[0].id, pair[1].id))]
    order += [own[-1].id, finish]
    if order != sorted(order):
        raise ProgramError(f"{name} is compressed, sent and turned back in another order: {order}.")


def notices_of(program: Program) -> tuple[str, ...]:
    """What a person should know of a program whose gradients are compressed."""
    plan, kept = program.plan, [b for b in program.buckets if is_compressed(program.plan, b)]
    if not kept:
        return ()
    before = sum(bucket.num_bytes for bucket in kept)
    after = sum(bytes_sent(b, plan.sync, plan.mesh.size_of(b.axis or "")) for b in kept)
    told = (
        f"sync.compress={plan.sync.compress}: gradients travel in {format_bytes(after)} instead of "
        f"{format_bytes(before)} a step"
    )
    rest = "; what is not sent yet is not part of checkpoints" if plan.sync.compress not in CASTS else ""
    absent = sorted(program.conditional) if plan.sync.compress not in CASTS else []
    unused = f" Where a step does not use {absent[0]}, its gradient counts as zero." if absent else ""
    return (f"{told}. This is lossy{rest}.{unused}",)


def _spec(count: int, dtype: torch.dtype) -> Spec:
    return Spec(kind="gradient", shape=(count,), dtype=dtype)
