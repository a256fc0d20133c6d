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
    Wait,
)
from plait.program.local.localize import LocalGraph
from plait.program.segment.buckets import bucket_reads
from plait.program.write.compression import CompressedSums, is_compressed

if TYPE_CHECKING:
    from plait.program.write.build import StepBuilder

IN_FLIGHT = 2
"""Buckets that may travel at once where gradients are sharded."""


class GradientWriter:
    """Fills, sums and finishes the buckets of a step."""

    def __init__(self, builder: "StepBuilder") -> None:
        self.builder = builder
        self.travelling: list[tuple[int, bool, int | None]] = []
        """Sharded buckets under way: (bucket, whether its sum is the first of the step, micro-batch)."""
        self.compressed = CompressedSums(builder.plan, builder.add, builder.values, builder.storages)

    def finish(self) -> None:
        late = self.builder.micro[0][0].static_weight is None and not self.builder.micro[0][0].weight_is_early
        if self.builder.servers is not None:
            return self.builder.servers.finish(late_weight=late)
        while self.travelling:
            self._settle()
        self.compressed.settle()
        for index, bucket in enumerate(self.builder.buckets):
            if bucket.axis is not None:
                self.builder.wait(f"bucket:{index}", None)
        names = tuple(
            f"{'bucket' if bucket.group is None else 'shard'}:{index}"
            for index, bucket in enumerate(self.builder.buckets)
        )
        self._join_tied()
        squares: tuple[str, ...] = ()
        cut = {axis for name in self.builder.layout.parameters for axis in self.builder.layout.cut_axes(name)}
        if self.builder.clip_norm is not None and cut:
            axes = tuple(name for name, _ in self.builder.plan.mesh.axes if name in cut)
            self.builder.add(SquareSum, "squares", "update", reads=names, writes=("squares",), axes=axes)
            self.builder.start("squares", "all_reduce", "+".join(axes), None, 8)
            self.builder.wait("squares", None)
            squares = ("squares",)
        self.builder.add(
            Finish,
            "finish gradients",
            "update",
            reads=(*names, *squares),
            writes=("total", "weight"),
            late_weight=late,
            clip_norm=self.builder.clip_norm,
        )
        if not self.builder.plan.pipe.asynchronous:
            self.builder.add(Update, "update", "update", reads=names)
        return None

    def _join_tied(self) -> None:
        """Parts of the same gradients on several stages: everybody sends its own to the others and adds all up."""
        own = self.builder.coordinate
        for index, bucket in enumerate(self.builder.buckets):
            others = [at for at in bucket.tied if at != own]
            if not others:
                continue
            name = f"{'bucket' if bucket.group is None else 'shard'}:{index}"
            what = f"tied {bucket.parameters[0]}"
            num_bytes = bucket.num_bytes // (bucket.group.chunks if bucket.group is not None else 1)
            posted = {
                at: self.builder.add(
                    Recv, f"receive {what} {at}>{own}", "communication", lane="communication", axis=PIPE, source=at,
                    message=f"{what} {at}>{own}", writes=(f"part:{index}:{at}",), num_bytes=num_bytes,
                )
                for at in others
            }  # fmt: skip
            for at in others:
                self.builder.add(
                    Send, f"send {what} {own}>{at}", "communication", lane="communication", axis=PIPE, to=at,
                    message=f"{what} {own}>{at}", reads=(name,), num_bytes=num_bytes,
                )  # fmt: skip
            parts = tuple(f"part:{index}:{at}" for at in others)
            for at, part in zip(others, parts, strict=True):
                self.builder.add(
                    Wait, f"wait for {what} {at}>{own}", "wait", of=posted[at], reads=(part,), writes=(part,)
                )
            self.builder.add(
                Join, f"join {what}", "update", bucket=index, reads=(name, *parts), writes=(name,),
                parts=tuple(others), own=own,
            )  # fmt: skip

    def fill(self, graph: Graph, local: LocalGraph, index: int, number: int, fresh: bool, send: bool) -> None:
        """Put the gradients of a micro-batch into a bucket."""
        nodes = bucket_reads(graph, local, self.builder.buckets, index)
        reads = [self.builder.name_of(graph, node, number) for node in nodes]
        for name in reads:  # a gradient that is itself the result of a collective
            self.builder.wait(name, number)
        self.accumulate(index, tuple(reads), number, fresh=fresh, send=send)

    def accumulate(
        self, index: int, reads: tuple[str, ...], number: int | None, *, fresh: bool, send: bool
    ) -> None:
        """Put gradients into a bucket (none: zeros) and, where they are the last, send it."""
        bucket = self.builder.buckets[index]
        scattered = bucket.group is not None
        pooled = scattered and self.builder.layout.zero >= 2
        while pooled and (
            len(self.travelling) == IN_FLIGHT or index in [other for other, *_ in self.travelling]
        ):
            self._settle()
        self.builder.add(
            Accumulate,
            f"bucket {index}",
            "backward",
            reads=reads,
            writes=(f"bucket:{index}",),
            bucket=index,
            fresh=fresh or pooled,
            micro_batch=number,
        )
        if scattered and (send or pooled):
            self._start_scatter(index, number)
            self.travelling.append((index, fresh or not pooled, number))
            if not self.builder.plan.sync.overlap:
                self._settle()
        elif send and self.builder.servers is not None:
            self.builder.servers.push(index, number)
        elif send and is_compressed(self.builder.plan, bucket):
            self.compressed.send(index, bucket, number)
        elif send and bucket.axis is not None and not scattered:
            self.builder.start(f"bucket:{index}", "all_reduce", bucket.axis, number, bucket.num_bytes)
            if not self.builder.plan.sync.overlap:
                self.builder.wait(f"bucket:{index}", number)

    def _start_scatter(self, index: int, number: int | None) -> None:
        bucket = self.builder.buckets[index]
        assert bucket.group is not None
        name = f"shard:{index}"
        self.builder.started[name] = self.builder.add(
            Collective,
            f"reduce_scatter bucket:{index}",
            "communication",
            lane="communication",
            op="reduce_scatter",
            axis=DATA,
            extents=(bucket.group.chunk_elements,) * bucket.group.chunks,
            reads=(f"bucket:{index}",),
            writes=(name,),
            micro_batch=number,
            num_bytes=bucket.num_bytes,
        )

    def _settle(self) -> None:
        """Take this rank's part of the bucket that has travelled longest."""
        index, fresh, number = self.travelling.pop(0)
        bucket, name = self.builder.buckets[index], f"shard:{index}"
        assert bucket.group is not None
        self.builder.wait(name, number)
        if bucket.other_axes is not None:
            num_bytes = bucket.group.chunk_elements * bucket.dtype.itemsize
            self.builder.start(name, "all_reduce", bucket.other_axes, number, num_bytes)
            self.builder.wait(name, number)
        self.builder.add(
            Keep, f"keep shard {index}", "backward", reads=(name,), writes=(name,), bucket=index, fresh=fresh,
            micro_batch=number,
        )  # fmt: skip
