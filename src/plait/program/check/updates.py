"""Prove that a program without flushes updates every stage once for every micro-batch, on the weights that it says.

In: a `Program` in which micro-batches are updates of their own. Out: nothing, or a `ProgramError` that names the
instructions at fault. Checked for each rank: the gradients of a micro-batch fill their buckets afresh, are summed over
ranks, and used by one update before the next ones come; all that reads a trained parameter for a micro-batch reads one
version of it; nothing that shows a parameter is read after an update. With vertical sync all stages read one version.
"""

from plait.errors import ProgramError
from plait.program.check.messages import told
from plait.program.instructions import Accumulate, Collective, Instruction, Recv, Stash, Update, Wait
from plait.program.program import Bucket, Program, RankProgram
from plait.program.stage.versions import first_reads, version_read
from plait.program.value import Value


def check_update_of_each(program: Program, entry: RankProgram) -> None:
    """Raise where an update misses gradients, or a micro-batch its update."""
    updates = [i for i in entry.instructions if isinstance(i, Update)]
    count = len(program.micro_batches)
    if [i.micro_batch for i in updates] != list(range(count)):
        found = ", ".join(told(i) for i in updates) or "none"
        raise ProgramError(
            f"every one of {count} micro-batches must have one update, in their order; there is {found}."
        )
    for index, bucket in enumerate(entry.buckets):
        if bucket.parameters:
            _check_bucket(entry, index, bucket, updates)


def _check_bucket(entry: RankProgram, index: int, bucket: Bucket, updates: list[Update]) -> None:
    """Fill, sum, update; fill, sum, update."""
    name = Value.bucket(index)
    wanted = ["fill", *(["sum"] if bucket.axis is not None else []), "update"]
    since: list[tuple[str, Instruction]] = []
    for instruction in entry.instructions:
        if isinstance(instruction, Accumulate) and instruction.bucket == index:
            since.append(("fill", instruction))
        elif isinstance(instruction, Collective) and instruction.reads == (name,):
            since.append(("sum", instruction))
        elif isinstance(instruction, Update):
            since.append(("update", instruction))
            own = {i.micro_batch for _, i in since}
            fresh = all(i.fresh for _, i in since if isinstance(i, Accumulate))
            if [what for what, _ in since] != wanted or len(own) > 1 or not fresh:
                found = ", ".join(told(i) for _, i in since)
                raise ProgramError(
                    f"{name} must be filled afresh{', summed' if len(wanted) > 2 else ''} and used once for each "
                    f"micro-batch; there is {found}."
                )
            since = []
    if since:
        raise ProgramError(f"{told(since[-1][1])} comes after the last update, {told(updates[-1])}.")


def check_versions(entry: RankProgram) -> None:
    """Raise where a micro-batch reads two versions of the weights, or a stash is not what its name says."""
    trained = {name for bucket in entry.buckets for name in bucket.parameters}
    seen = first_reads(entry)
    written: dict[Value, int] = {}
    updates: list[Update] = []
    for instruction in entry.instructions:
        if isinstance(instruction, Stash):
            _check_stash(instruction, len(updates))
        for name in instruction.reads:
            _check_view(entry, name, written.get(name), updates, instruction)
            read = version_read(name, len(updates))
            if read is None or read[0] not in trained or isinstance(instruction, Stash):
                continue
            number = instruction.micro_batch
            if number is not None and read[1] != seen[number][0]:
                raise ProgramError(
                    f"{told(instruction)} reads {read[0]} after {read[1]} updates; micro-batch {number} began with "
                    f"that after {seen[number][0]} in {told(seen[number][1])}."
                )
        if not isinstance(instruction, Recv | Wait):  # what arrives has memory of its own
            written |= dict.fromkeys(instruction.writes, len(updates))
        if isinstance(instruction, Update):
            updates.append(instruction)


def _check_stash(stash: Stash, updates: int) -> None:
    if stash.version is None:
        return
    for source, name in zip(stash.reads, stash.writes, strict=True):
        made, kept = version_read(source, updates), version_read(name, updates)
        if made != kept or kept is None or kept[1] != stash.version:
            raise ProgramError(f"{told(stash)} keeps {source} after {updates} updates as {name}.")


def _check_view(
    entry: RankProgram, name: Value, since: int | None, updates: list[Update], reader: Instruction
) -> None:
    """What has no memory of its own shows that of a parameter or buffer."""
    shows = name.kind == "node" and name in entry.values and not entry.storages.get(name)
    if shows and since is not None and since < len(updates):
        raise ProgramError(
            f"{told(reader)} reads {name}, which shows weights that {told(updates[since])} has changed."
        )


def check_vertical_sync(program: Program) -> None:
    """Raise where two stages compute a micro-batch with weights of different numbers of updates."""
    begun: dict[int, tuple[int, Instruction]] = {}
    for entry in program.classes:
        for number, (version, reader) in first_reads(entry).items():
            other, before = begun.setdefault(number, (version, reader))
            if other != version:
                raise ProgramError(
                    f"{told(reader)} reads weights after {version} updates; {told(before)} reads them after {other}."
                )
