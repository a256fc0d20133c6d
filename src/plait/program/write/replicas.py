"""Ranks that are threads of one process: the first one gives weights to the others and takes their gradients.

In: a step whose ranks sum gradients among all of them. Out: the same step as torch.nn.DataParallel makes it. The batch
that the process has read is scattered; all that the step reads of the model is replicated; after the forward the losses
are gathered; after the backward, and not beside it, gradients are reduced. The first rank alone divides, clips and
updates: the others have nothing to hold from step to step.
"""

from dataclasses import replace

from plait.errors import ProgramError
from plait.plan.plan import DATA, Plan
from plait.program.instructions import (
    Accumulate,
    Collective,
    Finish,
    Flatten,
    Instruction,
    Load,
    Mix,
    Update,
    Wait,
)
from plait.program.program import Bucket, Program, RankProgram, Spec, Storage
from plait.program.value import Value
from plait.program.write.averaging import Shapes, flat_buckets
from plait.program.write.frees import with_frees
from plait.program.write.writer import Writer


def with_replicas(program: Program) -> Program:
    """The program of threads, where the plan has them."""
    if not program.plan.agreement.threads or program.plan.mesh.size == 1:
        return program
    roles = [(own, rank == 0) for rank, own in enumerate(program.members)]
    known = list(dict.fromkeys(roles))
    classes = tuple(_with_role(program.classes[own], program.plan, first=first) for own, first in known)
    return replace(program, classes=classes, members=tuple(map(known.index, roles)))


def _with_role(entry: RankProgram, plan: Plan, *, first: bool) -> RankProgram:
    limit = plan.sync.bucket_mib * 2**20
    flats = [
        replace(flat, parameters=(), buffers=flat.parameters) if kind == "buffer" else flat
        for kind in ("parameter", "buffer")
        for flat in flat_buckets(_held(entry, kind), limit)
    ]
    writer = _Replica(entry, first=first)
    writer.replicate(flats)
    writer.step()
    values, storages = dict(entry.values), dict(entry.storages)
    for index, flat in enumerate(flats):
        values[Value.average(index)] = Spec(kind="parameter", shape=(flat.num_elements,), dtype=flat.dtype)
        storages[Value.average(index)] = (Storage(Value.average(index), flat.num_bytes),)
    return replace(
        entry,
        instructions=tuple(with_frees(writer.written.instructions)),
        values=values,
        storages=storages,
        averages=tuple(flats),
    )


def _held(entry: RankProgram, kind: str) -> Shapes:
    """What the step reads of the model, as it lies in memory."""
    return {
        value.name: (spec.shape, spec.dtype) for value, spec in entry.values.items() if value.kind == kind
    }


class _Replica:
    """Writes the instructions of one rank."""

    def __init__(self, entry: RankProgram, *, first: bool) -> None:
        self.entry, self.first = entry, first
        self.written = Writer()

    def replicate(self, flats: list[Bucket]) -> None:
        """Before anything is computed: all is on its way before the first piece is waited for."""
        started = []
        for index, flat in enumerate(flats):
            own = (Value.average(index),)
            if self.first:
                self.written.add(
                    Flatten(
                        name=f"flatten {index}", kind="forward", flat=index, reads=flat.tensors, writes=own
                    )
                )
            started.append(
                self.written.add(
                    Collective(
                        name=f"replicate {index}", op="broadcast", axis=DATA, num_bytes=flat.num_bytes,
                        reads=own if self.first else (), writes=own,
                    )
                )
            )  # fmt: skip
        for index, flat in enumerate(flats):
            self.written.wait(started[index], f"replicate {index}")
            if not self.first:
                self.written.add(
                    Mix(
                        name=f"take {index}", kind="forward", flat=index, rule="take", writes=flat.tensors,
                        reads=(Value.average(index),),
                    )
                )  # fmt: skip

    def step(self) -> None:
        """The rest, in its order; sums of gradients wait for the end of the backward."""
        at: dict[int, int] = {}
        reduced: set[int] = set()
        late: list[Collective] = []
        for instruction in self._with_losses_early():
            bucket = self._bucket(instruction)
            if isinstance(instruction, Collective) and bucket is not None:
                reduced.add(instruction.id)
                if _is_of_losses(bucket):
                    self._reduce([instruction], "gather losses")
                else:
                    late.append(instruction)
            elif isinstance(instruction, Wait):
                if instruction.of not in reduced:
                    at[instruction.id] = self.written.add(replace(instruction, of=at[instruction.of]))
            else:
                if isinstance(instruction, Finish):
                    self._reduce(late, "reduce")
                if self.first or not isinstance(instruction, Finish | Update):
                    at[instruction.id] = self.written.add(self._scattered(instruction))

    def _with_losses_early(self) -> list[Instruction]:
        """The instructions, with losses taken together as soon as they are there: the backward begins after that."""
        found: list[Instruction] = []
        for instruction in self.entry.instructions:
            bucket, at = self._bucket(instruction), len(found)
            if bucket is not None and _is_of_losses(bucket):
                needed = {*instruction.reads, Value.bucket(self.entry.buckets.index(bucket))}
                at = 1 + max(i for i, other in enumerate(found) if needed & set(other.writes))
            found.insert(at, instruction)
        return found

    def _bucket(self, instruction: Instruction) -> Bucket | None:
        """The bucket that an instruction fills or adds up."""
        if isinstance(instruction, Accumulate):
            return self.entry.buckets[instruction.bucket]
        source = instruction.source if isinstance(instruction, Collective) else None
        return self.entry.buckets[source.number] if source is not None and source.kind == "bucket" else None

    def _reduce(self, sums: list[Collective], name: str) -> None:
        """All on their way before the first one is waited for."""
        named = {one.id: f"{name} {one.reads[0].number}" if len(sums) > 1 else name for one in sums}
        started = [
            self.written.add(
                replace(one, op="reduce", name=named[one.id], writes=one.writes if self.first else ())
            )
            for one in sums
        ]
        for number, one in zip(started, sums, strict=True):
            self.written.wait(number, named[one.id])

    def _scattered(self, instruction: Instruction) -> Instruction:
        """A share comes from the batch that the whole process has read."""
        if not isinstance(instruction, Load):
            return instruction
        specs = [self.entry.values.get(value) for value in instruction.writes if value.kind == "batch"]
        return replace(
            instruction,
            name=f"scatter {instruction.micro_batch}",
            num_bytes=sum(s.num_bytes for s in specs if s),
        )


def _is_of_losses(bucket: Bucket) -> bool:
    return not (bucket.parameters or bucket.buffers)


def check_replicas(program: Program) -> None:
    """Raise where another rank than the first updates, or reads what it was not given."""
    for rank, own in enumerate(program.members):
        entry = program.classes[own]
        updates = [i for i in entry.instructions if isinstance(i, Update)]
        if len(updates) != (1 if rank == 0 else 0):
            raise ProgramError(
                f"rank {rank} of threads updates {len(updates)} times; the first one does, once."
            )
        given = {value for i in entry.instructions if isinstance(i, Mix) for value in i.writes}
        read = {v for i in entry.instructions for v in i.reads if v.kind in ("parameter", "buffer")}
        if rank > 0 and not read <= given:
            missing = sorted(map(str, read - given))[0]
            raise ProgramError(f"rank {rank} of threads reads {missing}, which nobody gives it.")
