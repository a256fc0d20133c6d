"""Write down what happens to gradients: into buckets, summed over ranks, and what remains to do before the update.

In: the nodes that are gradients, through a `StepBuilder`. Out: instructions. A bucket is sent as soon as the last
micro-batch has filled it; where gradients are sharded over `data`, every rank gets the sum of its own part alone, and
whatever has been summed is given up at once.
"""

from typing import TYPE_CHECKING

from plait.graph.graph import Graph
from plait.plan.plan import DATA, PIPE
from plait.program.instructions import (
    Accumulate,
    Collective,
    Finish,
    Join,
    Keep,
    Recv,
    Send,
    SquareSum,
    Update,
)
from plait.program.local.local_graph import LocalGraph
from plait.program.segment.buckets import bucket_reads
from plait.program.value import SQUARES, TOTAL, WEIGHT, Value
from plait.program.write.compression import CompressedSums, is_compressed
from plait.program.write.push_pull import SERVERS

if TYPE_CHECKING:
    from plait.program.write.build import StepBuilder

IN_FLIGHT = 2
"""Buckets that may travel at once where gradients are sharded."""


class GradientWriter:
    """Fills, sums and finishes the buckets of a step."""

    def __init__(self, builder: "StepBuilder") -> None:
        self.builder, self.writer = builder, builder.writer
        self.travelling: list[tuple[int, bool, int | None]] = []
        """Sharded buckets under way: (bucket, whether its sum is the first of the step, micro-batch)."""
        self.summing: list[int] = []
        """Whole buckets under way, where they are waited for before the end."""
        self.compressed = CompressedSums(builder.plan, builder.writer, builder.values, builder.storages)

    def finish(self) -> None:
        late = self.builder.late_weight
        while self.travelling:
            self._settle()
        self.compressed.settle()
        for index, bucket in enumerate(self.builder.buckets):
            if bucket.axis is not None:
                self.builder.wait(Value.bucket(index), None)
        if self.builder.servers is not None:
            return self.builder.servers.finish(late_weight=late)
        names = tuple(map(self._kept, range(len(self.builder.buckets))))
        self._join_tied()
        squares: tuple[Value, ...] = ()
        cut = {axis for name in self.builder.layout.parameters for axis in self.builder.layout.cut_axes(name)}
        clip = self.builder.clip
        if clip.norms and cut:
            axes = tuple(name for name, _ in self.builder.plan.mesh.axes if name in cut)
            self.writer.add(SquareSum(name="squares", reads=names, writes=(SQUARES,), axes=axes, clip=clip))
            self.builder.start(SQUARES, "+".join(axes), None, 8 * len(clip.norms))
            self.builder.wait(SQUARES, None)
            squares = (SQUARES,)
        self.writer.add(
            Finish(
                name="finish gradients",
                reads=(*names, *squares),
                writes=(TOTAL, WEIGHT),
                late_weight=late,
                clip=clip,
            )
        )
        if not self.builder.plan.pipe.asynchronous:
            self.writer.add(Update(name="update", reads=names))
        return None

    def _kept(self, index: int) -> Value:
        """What this rank has of a summed bucket."""
        return (Value.bucket if self.builder.buckets[index].group is None else Value.shard)(index)

    def _join_tied(self) -> None:
        """Parts of the same gradients on several stages: everybody sends its own to the others and adds all up.

        All go through them in one order, whatever numbers they have here: messages are received as they are sent.
        """
        own, buckets = self.builder.coordinate, self.builder.buckets
        for index in sorted(range(len(buckets)), key=lambda index: buckets[index].parameters):
            bucket = buckets[index]
            others = [at for at in bucket.tied if at != own]
            if not others:
                continue
            kept = self._kept(index)
            what = f"tied {bucket.parameters[0]}"
            num_bytes = bucket.num_bytes // (bucket.group.chunks if bucket.group is not None else 1)
            posted = {
                at: self.writer.add(
                    Recv(
                        name=f"receive {what} {at}>{own}", axis=PIPE, source=at, message=f"{what} {at}>{own}",
                        writes=(Value.tied_part(index, at),), num_bytes=num_bytes,
                    )
                )
                for at in others
            }  # fmt: skip
            for at in others:
                self.writer.add(
                    Send(
                        name=f"send {what} {own}>{at}", axis=PIPE, to=at, message=f"{what} {own}>{at}",
                        reads=(kept,), num_bytes=num_bytes,
                    )
                )  # fmt: skip
            for at in others:
                self.writer.wait(posted[at], f"{what} {at}>{own}")
            self.writer.add(
                Join(
                    name=f"join {what}", bucket=index, writes=(kept,), parts=tuple(others), own=own,
                    reads=(kept, *(Value.tied_part(index, at) for at in others)),
                )
            )  # fmt: skip

    def fill(self, graph: Graph, local: LocalGraph, index: int, number: int, fresh: bool, send: bool) -> None:
        """Put the gradients of a micro-batch into a bucket."""
        nodes = bucket_reads(graph, local, self.builder.buckets, index)
        reads = [self.builder.value_of(graph, node, number) for node in nodes]
        for name in reads:  # a gradient that is itself the result of a collective
            self.builder.wait(name, number)
        self.accumulate(index, tuple(reads), number, fresh=fresh, send=send)

    def accumulate(
        self, index: int, reads: tuple[Value, ...], number: int | None, *, fresh: bool, send: bool
    ) -> None:
        """Put gradients into a bucket (none: zeros) and, where they are the last, send it."""
        bucket = self.builder.buckets[index]
        scattered = bucket.group is not None
        pooled = scattered and self.builder.layout.zero >= 2
        bounded = scattered and (pooled or self.builder.away is not None)
        while bounded and (
            len(self.travelling) == IN_FLIGHT or index in [other for other, *_ in self.travelling]
        ):
            self._settle()
        self.put(index, reads, number, fresh=fresh or pooled, begins=fresh)
        if scattered and (send or pooled):
            self._start_scatter(index, number)
            self.travelling.append((index, fresh or not pooled, number))
            if not self.builder.plan.sync.overlap:
                self._settle()
        elif send and self.builder.servers is not None and bucket.axis == SERVERS:
            self.builder.servers.push(index, number)
        elif send and is_compressed(self.builder.plan, bucket):
            self.compressed.send(index, bucket, number)
        elif send and bucket.axis is not None and not scattered:
            self.builder.start(Value.bucket(index), bucket.axis, number, bucket.num_bytes)
            self.summing.append(index)
            in_order = IN_FLIGHT if self.builder.away is not None else len(self.builder.buckets)
            while len(self.summing) > (in_order if self.builder.plan.sync.overlap else 0):
                self.builder.wait(Value.bucket(self.summing.pop(0)), number)

    def put(
        self, index: int, reads: tuple[Value, ...], number: int | None, *, fresh: bool, begins: bool
    ) -> None:
        """Put values into a bucket, and nothing else."""
        self.writer.add(
            Accumulate(
                name=f"bucket {index}",
                reads=reads,
                writes=(Value.bucket(index),),
                bucket=index,
                fresh=fresh,
                begins=begins,
                micro_batch=number,
            )
        )

    def _start_scatter(self, index: int, number: int | None) -> None:
        bucket = self.builder.buckets[index]
        assert bucket.group is not None
        self.builder.started[Value.shard(index)] = self.writer.add(
            Collective(
                name=f"reduce_scatter {Value.bucket(index)}",
                op="reduce_scatter",
                axis=DATA,
                extents=(bucket.group.chunk_elements,) * bucket.group.chunks,
                reads=(Value.bucket(index),),
                writes=(Value.shard(index),),
                micro_batch=number,
                num_bytes=bucket.num_bytes,
            )
        )

    def _settle(self) -> None:
        """Take this rank's shard of the bucket that has travelled longest."""
        index, fresh, number = self.travelling.pop(0)
        bucket, shard = self.builder.buckets[index], Value.shard(index)
        assert bucket.group is not None
        self.builder.wait(shard, number)
        if bucket.other_axes is not None:
            num_bytes = bucket.group.chunk_elements * bucket.dtype.itemsize
            self.builder.start(shard, bucket.other_axes, number, num_bytes)
            self.builder.wait(shard, number)
        self.writer.add(
            Keep(
                name=f"keep shard {index}", reads=(shard,), writes=(shard,), bucket=index, fresh=fresh,
                micro_batch=number,
            )
        )  # fmt: skip
