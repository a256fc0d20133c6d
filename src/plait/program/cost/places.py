"""Which gradients are made where they will travel from.

In: the program of a rank. Out: for gradients that are copied into a flat bucket which is empty before, the bucket and
the position: whoever makes them may write them there right away (`Segment.fillable`).
"""

from plait.program.instructions import Accumulate, Compute
from plait.program.program import RankProgram, Storage
from plait.program.value import Value


def places_of(own: RankProgram, zero: int) -> dict[Value, tuple[int, int]]:
    """Value -> (bucket, position in it)."""
    found: dict[Value, tuple[int, int]] = {}
    for instruction in own.instructions:
        if isinstance(instruction, Accumulate) and instruction.fresh:
            bucket = own.buckets[instruction.bucket]
            flat = bucket.axis is not None or bucket.tied
            if flat and (bucket.group is None or zero < 2):
                for position, name in enumerate(instruction.reads[: len(bucket.parameters)]):
                    found.setdefault(name, (instruction.bucket, position))
    return found


def storages_in_place(own: RankProgram, zero: int) -> frozenset[Storage]:
    """The storages that are parts of buckets, so that they take no memory of their own."""
    places = places_of(own, zero)
    made = {
        instruction.writes[position]
        for instruction in own.instructions
        if isinstance(instruction, Compute)
        for position in own.segments[instruction.segment].fillable
    }
    return frozenset(storage for value in made & places.keys() for storage in own.storages.get(value, ()))
