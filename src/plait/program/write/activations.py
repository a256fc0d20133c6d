"""Which activations of a step leave for the host between forward and backward.

In: the instructions of a step, what its values are like and whose memory they show. Out: parcels. What is made together
and needed again together travels together; of memory that several values show, all of them or none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.program.instructions import Compute, Instruction
from plait.program.program import Spec, Storage
from plait.program.value import Value
from plait.program.write.offload import AT_HAND, NEARBY, Parcel

_LEAST_BYTES = 64
"""Smaller ones stay."""
_FAR = NEARBY + 2 * AT_HAND
"""Segments for which nobody must need a tensor: it takes some to leave, and some to come back."""


@dataclass(slots=True)
class _Memory:
    """Memory that some values show."""

    num_bytes: int
    values: dict[Value, None] = field(default_factory=dict)
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(segments before, position) of every instruction that names one of them."""
    latest: int = -1
    """Where the last of them is named for the first time."""
    stays: bool = False
    """Whether something else than a segment names it."""

    @property
    def gap(self) -> tuple[int, int]:
        """(segments, index of the use before it) of the longest time for which nobody needs it."""
        spans = [
            (b[0] - a[0], index) for index, (a, b) in enumerate(zip(self.uses, self.uses[1:], strict=False))
        ]
        return max(spans, default=(0, 0))


def activation_parcels(
    instructions: Sequence[Instruction],
    specs: Mapping[Value, Spec],
    storages: Mapping[Value, tuple[Storage, ...]],
    share: float,
) -> list[Parcel]:
    """So much of what segments keep for later ones, the longest kept first."""
    found: dict[Storage, _Memory] = {}
    computed = 0
    for position, instruction in enumerate(instructions):
        computed += isinstance(instruction, Compute)
        for value in dict.fromkeys((*instruction.reads, *instruction.writes)):
            for storage in storages.get(value, ()) if value.kind == "node" else ():
                memory = found.setdefault(storage, _Memory(storage.num_bytes))
                if value not in memory.values:
                    memory.values[value], memory.latest = None, position
                memory.uses.append((computed, position))
                plain = value in specs and specs[value].kind == "activation" and len(storages[value]) == 1
                memory.stays |= not isinstance(instruction, Compute) or not plain
    total = sum(memory.num_bytes for memory in found.values() if memory.gap[0] > NEARBY)
    movable = [
        m
        for m in found.values()
        if not m.stays
        and m.num_bytes >= _LEAST_BYTES
        and m.gap[0] > _FAR
        # not what shows it only later: what leaves is stored at once, by all its names
        and m.latest <= m.uses[m.gap[1]][1]
    ]
    parcels: dict[tuple[int, int, int], list[_Memory]] = {}
    taken = 0
    for memory in sorted(movable, key=lambda memory: -memory.gap[0]):
        if taken >= share * total:
            break
        taken += memory.num_bytes
        at = memory.gap[1]
        key = (memory.uses[0][1], memory.uses[at][1], memory.uses[at + 1][1])
        parcels.setdefault(key, []).append(memory)
    return [
        Parcel(
            values=tuple(value for memory in own for value in memory.values),
            num_bytes=sum(memory.num_bytes for memory in own),
            lasting=False,
        )
        for own in parcels.values()
    ]
