"""Prove that a program is sound before anything runs.

In: a `Program`. Out: nothing, or a `ProgramError` that names the instructions at fault. Checked for each rank: every
value is written before it is read and freed once, after its last use; every collective and every message is awaited
exactly once, before its result is used; every gradient of every micro-batch is added up once, and summed over ranks
exactly once. Whether the ranks meet is in `messages.py`.
"""

from plait.errors import ProgramError
from plait.plan.plan import PIPE
from plait.program.check.copies import check_copies
from plait.program.check.messages import check_meetings, check_messages, check_progress, told
from plait.program.check.updates import check_update_of_each, check_versions, check_vertical_sync
from plait.program.instructions import (
    Accumulate,
    Collective,
    Finish,
    Instruction,
    Join,
    Keep,
    Update,
    Wait,
    is_start,
)
from plait.program.program import Bucket, Program, RankProgram
from plait.program.value import Value
from plait.program.write.compression import check_compressed, is_compressed
from plait.program.write.frees import PERSISTENT, RESULTS
from plait.program.write.push_pull import SERVERS, check_handled, check_served
from plait.program.write.replicas import check_replicas

_GIVEN = frozenset({"buffer", "chunk", "offset", "block", "stored"})


def check_program(program: Program) -> None:
    """Raise where the program could deadlock, read what is not there, keep what nobody needs, or miss a sum."""
    check_messages(program)
    replicated = any(isinstance(i, Collective) and i.op == "reduce" for i in program.classes[0].instructions)
    given = _GIVEN if program.layout.groups else _GIVEN | {"parameter"}
    for index, entry in enumerate(program.classes):
        if entry.serve is not None:
            continue  # what it does is decided by who comes; see check_handled
        try:
            _check_waits(entry)
            _check_values(entry, given)
            _check_sums(program, entry)
            check_copies(entry)
            if program.plan.agreement.weights == "server":
                check_served(entry)
            if program.plan.pipe.asynchronous:
                check_update_of_each(program, entry)
                check_versions(entry)
        except ProgramError as error:
            raise ProgramError(f"rank {program.members.index(index)}: {error.what}") from None
    _check_owners(program)
    if program.plan.pipe.vertical_sync:
        check_vertical_sync(program)
    check_meetings(program)
    check_progress(program)
    if len(program.members) > program.plan.mesh.size:
        check_handled(program)
    if replicated:
        check_replicas(program)


def _check_values(entry: RankProgram, always: frozenset[str]) -> None:
    alive: dict[Value, Instruction] = {}
    freed: dict[Value, Instruction] = {}
    for instruction in entry.everything:
        for name in instruction.reads:
            if name in freed:
                raise ProgramError(f"{told(instruction)} reads {name}, which {told(freed[name])} has freed.")
            if name not in alive and not _is_given(entry, name, always):
                raise ProgramError(f"{told(instruction)} reads {name} before it is written.")
        for name in instruction.writes:
            alive[name] = instruction
            freed.pop(name, None)
        for name in instruction.frees:
            if name in freed:
                raise ProgramError(
                    f"{name} is freed by {told(freed[name])} and again by {told(instruction)}."
                )
            if name not in alive and not _is_given(entry, name, always):
                raise ProgramError(f"{told(instruction)} frees {name}, which nobody has written.")
            freed[name] = instruction
            alive.pop(name, None)
    for name, instruction in alive.items():
        if name.kind not in PERSISTENT and name not in RESULTS:
            raise ProgramError(f"{name}, written by {told(instruction)}, is never freed.")


def _is_given(entry: RankProgram, value: Value, always: frozenset[str]) -> bool:
    return value.kind in always or value in entry.constants


def _check_waits(entry: RankProgram) -> None:
    open_: dict[int, Instruction] = {}
    pending: dict[Value, Instruction] = {}
    for instruction in entry.instructions:
        if isinstance(instruction, Wait):
            if instruction.of not in open_:
                raise ProgramError(f"{told(instruction)} waits for {instruction.of}, which is not under way.")
            for name in open_.pop(instruction.of).writes:
                pending.pop(name, None)
            continue
        for name in (*instruction.reads, *instruction.writes, *instruction.frees):
            if name in pending:
                raise ProgramError(
                    f"{told(instruction)} uses {name} while {told(pending[name])} is still communicating it."
                )
        if is_start(instruction):
            open_[instruction.id] = instruction
            for name in instruction.writes:
                pending[name] = instruction
    if open_:
        raise ProgramError(f"{told(next(iter(open_.values())))} is never awaited.")


def _check_sums(program: Program, entry: RankProgram) -> None:
    alone = program.plan.pipe.asynchronous
    updates = [i for i in entry.instructions if isinstance(i, Finish if alone else Update)]
    ends = [i.id for i in entry.instructions if isinstance(i, Finish | Update)]
    end = max(ends, default=len(entry.instructions))  # of a rank that another one updates for
    _check_added_once(entry)
    for index, bucket in enumerate(entry.buckets):
        if alone and bucket.parameters:
            continue  # in check_updates.py
        update = next((i.id for i in updates if isinstance(i, Update) and index in i.parts), end)
        name = Value.bucket(index)
        filled = [i for i in entry.instructions if isinstance(i, Accumulate) and i.bucket == index]
        sums = [i for i in entry.instructions if isinstance(i, Collective) and i.reads == (name,)]
        each = bucket.group is not None and program.layout.zero >= 2
        fresh = [True] * len(filled) if each else [True] + [False] * (len(filled) - 1)
        if not filled or [i.fresh for i in filled] != fresh:
            raise ProgramError(
                f"{name} is not filled afresh {'each time' if each else 'once and then added to'}."
            )
        _check_all_added(program, bucket, name, filled)
        if bucket.axis == SERVERS:
            continue  # in check_served
        if is_compressed(program.plan, bucket):
            check_compressed(entry, index, program.plan.sync, filled)
            continue
        wanted = len(filled) if each else 1 if bucket.axis is not None else 0
        if len(sums) != wanted:
            found = "".join(f", {told(i)}" for i in sums)
            raise ProgramError(
                f"{name} is summed {len(sums)} times over {bucket.axis}; it must be {wanted}: "
                f"{told(filled[-1])} fills it last{found}."
            )
        if sums and not filled[-1].id < sums[-1].id < update:
            raise ProgramError(
                f"{name} is summed by {told(sums[-1])}, not between its last gradient and the update."
            )
        if bucket.group is not None:
            _check_kept(entry, index, wanted, update)
        _check_joined(entry, index, bucket, max((i.id for i in sums), default=filled[-1].id), update)


def _check_added_once(entry: RankProgram) -> None:
    """No gradient is added to its parameter's twice, and no parameter has two buckets."""
    added: dict[tuple[str, Value], Accumulate] = {}
    for instruction in entry.instructions:
        if isinstance(instruction, Accumulate):
            bucket = entry.buckets[instruction.bucket]
            for pair in zip(bucket.parameters, instruction.reads, strict=False):
                if pair in added:
                    raise ProgramError(
                        f"gradient {pair[1]} of {pair[0]} is added by {told(added[pair])} and again by "
                        f"{told(instruction)}."
                    )
                added[pair] = instruction
    owners: dict[str, int] = {}
    for index, bucket in enumerate(entry.buckets):
        for name in bucket.parameters:
            if name in owners:
                raise ProgramError(
                    f"the gradient of {name} is in bucket:{owners[name]} and in bucket:{index}."
                )
            owners[name] = index


def _check_all_added(program: Program, bucket: Bucket, name: Value, filled: list[Accumulate]) -> None:
    """Every micro-batch contributes gradients; buffers are those of the last one, a loss that of the last stage."""
    if not bucket.parameters:
        return
    if bucket.tied and not any(i.reads for i in filled):
        return  # zeros: other stages have all the parts
    missing = set(range(len(program.micro_batches))) - {i.micro_batch for i in filled}
    if missing:
        raise ProgramError(
            f"{name} misses the gradients of micro-batch {min(missing)}: {told(filled[0])} to {told(filled[-1])} "
            "do not add them."
        )


def _check_kept(entry: RankProgram, index: int, wanted: int, update: int) -> None:
    kept = [i for i in entry.instructions if isinstance(i, Keep) and i.bucket == index]
    if len(kept) != wanted or [i.fresh for i in kept] != [True] + [False] * (wanted - 1):
        raise ProgramError(
            f"shard:{index} is kept {len(kept)} times, once afresh; it must be {wanted} times."
        )
    if kept[-1].id > update:
        raise ProgramError(f"shard:{index} is kept by {told(kept[-1])}, after the update.")


def _check_joined(entry: RankProgram, index: int, bucket: Bucket, summed: int, update: int) -> None:
    """Tied gradients are added up over their stages once, after the sum over the ranks of a stage."""
    joins = [i for i in entry.instructions if isinstance(i, Join) and i.bucket == index]
    if len(joins) != (1 if bucket.tied else 0):
        found = "".join(f": {told(i)}" for i in joins)
        raise ProgramError(
            f"bucket:{index}, tied over {bucket.tied} of {PIPE}, is joined {len(joins)} times{found}."
        )
    for join in joins:
        if sorted((join.own, *join.parts)) != sorted(bucket.tied):
            raise ProgramError(
                f"{told(join)} adds the parts of {join.parts} to that of {join.own}; bucket:{index} is tied over "
                f"{bucket.tied}."
            )
        if not summed < join.id < update:
            raise ProgramError(f"{told(join)} is not between the sum of bucket:{index} and the update.")


def _check_owners(program: Program) -> None:
    """A parameter that several coordinates of `pipe` train is tied over exactly these, on all of them."""
    places = {
        (own, program.plan.mesh.coordinate(rank, PIPE)): rank for rank, own in enumerate(program.members)
    }
    owners: dict[str, set[int]] = {}
    for own, coordinate in places:
        for bucket in program.classes[own].buckets:
            for name in bucket.parameters:
                owners.setdefault(name, set()).add(coordinate)
    for (own, _), rank in places.items():
        for index, bucket in enumerate(program.classes[own].buckets):
            for name in bucket.parameters:
                if set(bucket.tied) != (owners[name] if len(owners[name]) > 1 else set()):
                    raise ProgramError(
                        f"rank {rank}: the gradient of {name} is made on {sorted(owners[name])} of {PIPE}; "
                        f"bucket:{index} is tied over {list(bucket.tied)}."
                    )
