"""Gradients to servers, weights from them: what replaces the sums over ranks and the update.

In: the step that is being written, its buckets. Out: instructions. A bucket is pushed as soon as the last micro-batch
has filled it. Weights are asked for at the start of a step, in the order in which the forward first reads them, and
waited for where it does. A server's program is one instruction for the whole run: what comes next is not known.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from plait.errors import ProgramError
from plait.graph.graph import Graph
from plait.program.instructions import (
    Accumulate,
    Exchange,
    Handler,
    Leave,
    Outcome,
    Pull,
    Push,
    PushBuffers,
    Serve,
    Update,
)
from plait.program.program import Bucket, Program, RankProgram, Segment
from plait.program.segment.cut import Piece
from plait.program.value import TOTAL, WEIGHT, Value
from plait.program.write.writer import Writer

_GRADIENTS: tuple[Handler, ...] = (
    "push", "buffers", "skip", "pull", "bye", "squares", "state", "update"
)  # fmt: skip
_WEIGHTS: tuple[Handler, ...] = ("exchange", "pull", "bye", "update")

SERVERS = "servers"
"""What buckets that servers sum have in place of a mesh axis."""


def buckets_by_input(graph: Graph, buckets: Sequence[Bucket]) -> dict[str, int]:
    """The bucket of each parameter that is pulled, by placeholder."""
    of_name = {name: index for index, bucket in enumerate(buckets) for name in bucket.parameters}
    return {
        entry.node: of_name[entry.name] for entry in graph.inputs_of("parameter") if entry.name in of_name
    }


def in_order_of_use(graph: Graph, buckets: Sequence[Bucket], pieces: Sequence[Piece]) -> list[int]:
    """The buckets whose parameters pieces read, those that are read first first."""
    of_input = buckets_by_input(graph, buckets)
    segments = [piece for piece in pieces if isinstance(piece, Segment)]
    return list(dict.fromkeys(of_input[name] for s in segments for name in s.inputs if name in of_input))


class ServerSide:
    """What a worker's step exchanges with the servers."""

    def __init__(self, buckets: Sequence[Bucket], writer: Writer) -> None:
        self._buckets = buckets
        self._writer = writer
        self._started: dict[int, int] = {}

    def pull(self, order: Iterable[int]) -> None:
        """Ask for the weights of buckets."""
        for index in order:
            bucket = self._buckets[index]
            self._started[index] = self._writer.add(
                Pull(
                    name=f"pull {index}", bucket=index, writes=tuple(map(Value.parameter, bucket.parameters)),
                    num_bytes=_weight_bytes(bucket),
                )
            )  # fmt: skip

    def wait(self, order: Iterable[int], number: int | None) -> None:
        """Have the weights of buckets at hand."""
        for index in order:
            if index in self._started:
                self._writer.wait(self._started.pop(index), f"weights {index}", number)

    def push(self, index: int, number: int | None) -> None:
        """Send a bucket that is full."""
        self._writer.add(
            Push(
                name=f"push {index}", bucket=index, reads=(Value.bucket(index),), micro_batch=number,
                num_bytes=self._buckets[index].num_bytes,
            )
        )  # fmt: skip

    def push_buffers(self, names: Sequence[str]) -> None:
        """Send what a step has made of the buffers, for whoever continues from a checkpoint."""
        reads = tuple(map(Value.buffer, names))
        self._writer.add(PushBuffers(name="push buffers", reads=reads, buffers=tuple(names)))

    def finish(self, *, late_weight: bool) -> None:
        """The end of a step: the servers do the rest."""
        names = tuple(map(Value.bucket, range(len(self._buckets))))
        self._writer.add(
            Outcome(name="outcome", reads=names, writes=(TOTAL, WEIGHT), late_weight=late_weight)
        )


def with_servers(program: Program) -> Program:
    """The program with what its servers, or the rank that has the center, do; workers tell them when they leave."""
    agreement, first = program.plan.agreement, program.classes[0]
    if not agreement.least_servers:
        return program
    buffers = [i for i in first.instructions if isinstance(i, PushBuffers)]
    gradients = agreement.weights == "server"
    serve = Serve(
        id=0,
        name="serve",
        handlers=_GRADIENTS if gradients else _WEIGHTS,
        order=agreement.order,
        bound=program.plan.sync.staleness,
        gives=tuple(i.bucket for i in first.instructions if isinstance(i, Pull))
        if gradients
        else tuple(range(len(first.averages))),
        buffers=buffers[0].buffers if buffers else (),
    )
    server = RankProgram(
        instructions=(serve,),
        buckets=first.buckets if gradients else (),
        segments={},
        values={},
        constants={},
        averages=first.averages,
    )
    workers = [
        replace(entry, epilogue=(Leave(id=len(entry.everything), name="leave"),)) for entry in program.classes
    ]
    members = (*program.members[: program.plan.mesh.size], *(len(workers),) * program.plan.sync.servers)
    return replace(program, classes=(*workers, server), members=members)


def check_served(entry: RankProgram) -> None:
    """Raise where a worker updates by itself, or a bucket is not pushed once, full, or its weights not pulled once."""
    pushes = [i for i in entry.instructions if isinstance(i, Push)]
    pulls = [i.bucket for i in entry.instructions if isinstance(i, Pull)]
    if any(isinstance(i, Update) for i in entry.instructions):
        raise ProgramError("a worker updates weights that a server holds.")
    for index, bucket in enumerate(entry.buckets):
        filled = [i.id for i in entry.instructions if isinstance(i, Accumulate) and i.bucket == index]
        sent = [i.id for i in pushes if i.bucket == index]
        if bucket.axis == SERVERS and (len(sent) != 1 or sent[0] < max(filled, default=-1)):
            raise ProgramError(f"bucket:{index} is pushed {len(sent)} times, or before it is full.")
        if bucket.parameters and bucket.axis == SERVERS and pulls.count(index) != 1:
            raise ProgramError(f"the weights of bucket:{index} are pulled {pulls.count(index)} times.")


def _weight_bytes(bucket: Bucket) -> int:
    return bucket.num_bytes - len(bucket.scalars) * bucket.dtype.itemsize


def check_handled(program: Program) -> None:
    """Raise where a worker sends what no server handles, or stays away without a word."""
    serves = [program.of(rank).serve for rank in range(program.plan.mesh.size, len(program.members))]
    wanted: dict[type, Handler] = {
        Push: "push",
        PushBuffers: "buffers",
        Pull: "pull",
        Exchange: "exchange",
        Leave: "bye",
    }
    for rank, own in enumerate(program.members[: program.plan.mesh.size]):
        entry = program.classes[own]
        for instruction in entry.everything:
            handler = wanted.get(type(instruction))
            if handler is not None and not any(serve and handler in serve.handlers for serve in serves):
                raise ProgramError(
                    f"rank {rank} sends {handler} in {instruction.name!r}; no rank handles it."
                )
        if serves and not any(isinstance(i, Leave) for i in entry.epilogue):
            raise ProgramError(f"rank {rank} never leaves: its servers would wait for it for ever.")
