"""Prove that nothing is lost between the device and the host, and that updates in parts are those of the whole.

In: a rank's program. Out: nothing, or a `ProgramError` that names the instructions at fault. That nothing is used which
is not at hand follows from `soundness.py`: what leaves is freed, and what comes must be awaited.
"""

from collections.abc import Collection, Mapping

from plait.errors import ProgramError
from plait.program.check.messages import told
from plait.program.instructions import Compute, Copy, Instruction, Update, Wait
from plait.program.program import RankProgram
from plait.program.value import Value


def check_copies(entry: RankProgram) -> None:
    """Raise where a change does not reach the host, what was never stored is fetched, or an update is amiss."""
    _check_changes(entry)
    if any(isinstance(i, Update) and i.parts for i in entry.instructions):
        _check_parts(entry)


def _check_changes(entry: RankProgram) -> None:
    at_hand: dict[Value, Instruction | None] = {}
    """What has come, and who has changed it since."""
    stored: set[Value] = set()
    away = {v for i in entry.instructions if isinstance(i, Copy) and i.way == "in" for v in i.writes}
    fetches = {i.id for i in entry.instructions if isinstance(i, Copy)}
    lasting = {value for value in away if value.micro_batch is None}
    written: set[Value] = set()
    """What shows a parameter that is still where it was then."""
    for instruction in entry.instructions:
        if isinstance(instruction, Update) and instruction.lane == "host":
            _check_on_host(entry, instruction, at_hand, stored)
        if not isinstance(instruction, Copy):
            missing = [v for v in instruction.reads if v in lasting and v not in at_hand]
            missing += [v for v in instruction.reads if entry.shows.get(v) in lasting and v not in written]
            if missing:
                raise ProgramError(f"{told(instruction)} reads {missing[0]}, which is on the host.")
            written.update(value for value in instruction.writes if value in entry.shows)
            if not (isinstance(instruction, Wait) and instruction.of in fetches):
                at_hand.update((value, instruction) for value in instruction.writes if value in at_hand)
        elif instruction.way == "in":
            for source in instruction.reads:
                if source.micro_batch is not None and source not in stored:
                    raise ProgramError(f"{told(instruction)} fetches {source}, which nobody has stored.")
            at_hand |= dict.fromkeys(instruction.writes)
        else:
            for value in instruction.reads:
                change = at_hand.pop(value, None)
                if change is not None and instruction.way == "drop":
                    raise ProgramError(
                        f"{told(instruction)} loses {value}, which {told(change)} has changed."
                    )
            stored.update(instruction.writes)
            written -= {value for value in written if entry.shows[value] in instruction.reads}
    for value, change in at_hand.items():
        if change is not None and value.micro_batch is None:
            raise ProgramError(f"{value}, changed by {told(change)}, does not reach the host.")


def _check_on_host(
    entry: RankProgram, update: Update, at_hand: Mapping[Value, object], stored: Collection[Value]
) -> None:
    """What the host updates is there alone, with the gradients of this step."""
    shared = [value for value in at_hand if Value.stored(value) in update.reads]
    if shared:
        raise ProgramError(f"{told(update)} changes {shared[0]}, which is at hand on the device.")
    for index in update.parts:
        kept = Value.bucket(index) if entry.buckets[index].group is None else Value.shard(index)
        if Value.stored(kept) not in stored:
            raise ProgramError(f"{told(update)} uses {kept}, which nobody has stored.")


def _check_parts(entry: RankProgram) -> None:
    """Every bucket is updated once, and nobody reads the parameters of a part after it."""
    by: dict[int, Update] = {}
    for instruction in entry.instructions:
        if isinstance(instruction, Update):
            for index in instruction.parts or range(len(entry.buckets)):
                if index in by:
                    raise ProgramError(
                        f"bucket:{index} is updated by {told(by[index])} and {told(instruction)}."
                    )
                by[index] = instruction
        elif isinstance(instruction, Compute):
            for value in instruction.reads:
                for index, update in by.items():
                    if value.kind == "parameter" and value.name in entry.buckets[index].parameters:
                        raise ProgramError(
                            f"{told(instruction)} reads {value} after its update, {told(update)}."
                        )
    missing = [i for i, bucket in enumerate(entry.buckets) if bucket.parameters and i not in by]
    if missing:
        raise ProgramError(f"bucket:{missing[0]} is never updated.")
