"""Write down what lies on the host between its uses: copies out after a stretch of use, and in before the next.

In: the instructions of a step, and the parcels that have no place on the device all the time. Out: the same
instructions with `Copy` and `Wait` between. Few parcels of a kind are at hand at once: the next one is fetched when
an earlier one has left, so that it travels while the device computes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plait.program.instructions import Compute, Copy, Instruction, Wait
from plait.program.value import Value, ValueKind
from plait.program.write.writer import Rewriter

AT_HAND = 3
"""Parcels of a kind that are on the device at once, at least: one is in use, one leaves, one comes."""
_AHEAD = 5
"""One of so many parcels is at hand: what comes before the first is needed does not have to come later, when those that
are needed one after the other come as fast as the bus allows."""
NEARBY = 2
"""A parcel stays from one use to the next where at most so many segments lie between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """Values that travel together."""

    values: tuple[Value, ...]
    """As instructions on the device call them."""
    num_bytes: int
    lasting: bool
    """Whether it is on the host before the step and after it; else the step makes it."""
    stays: bool = False
    """Whether it is at hand from its first use in a step to the last, however many there are."""
    wanted: bool = False
    """Whether the host uses it after its last use on the device."""

    @property
    def kind(self) -> ValueKind:
        """Of its values: parcels of one kind share the room on the device."""
        return self.values[0].kind

    @property
    def stored(self) -> tuple[Value, ...]:
        """What its values are called on the host."""
        return tuple(map(Value.stored, self.values))


@dataclass(slots=True)
class _Stretch:
    """Instructions during which a parcel is at hand."""

    parcel: Parcel
    first: int
    last: int
    changed: bool
    """Whether it is written there."""
    is_first: bool
    is_last: bool = False
    after: int = -1
    """Where the stretch before it ends; -1: there is none."""

    @property
    def comes(self) -> bool:
        """Whether it has to be fetched."""
        return self.parcel.lasting or not self.is_first

    @property
    def leaves(self) -> bool:
        """Whether the host has to have what it is now."""
        return self.changed and (self.parcel.lasting or self.parcel.wanted or not self.is_last)


@dataclass(slots=True)
class _Places:
    """What is put where: by the index of an instruction."""

    fetched: dict[int, list[Copy]] = field(default_factory=dict)
    """After it; -1: before all."""
    awaited: dict[int, list[Copy]] = field(default_factory=dict)
    """Before it."""
    left: dict[int, list[Copy]] = field(default_factory=dict)
    """After it."""


def at_hand(num_parcels: int) -> int:
    """How many of so many parcels of a kind are on the device at once."""
    return max(AT_HAND, num_parcels // _AHEAD)


def with_copies(
    instructions: Sequence[Instruction], parcels: Iterable[Parcel], shows: Mapping[Value, Value]
) -> list[Instruction]:
    """The instructions, numbered anew, with copies of the parcels around their uses; who reads a value that `shows`
    another one uses that."""
    stretches = _stretches(instructions, list(parcels), shows)
    places = _Places()
    for shared in dict.fromkeys((stretch.parcel.kind, stretch.parcel.stays) for stretch in stretches):
        _place([s for s in stretches if (s.parcel.kind, s.parcel.stays) == shared], places)
    return _merged(instructions, places)


def _stretches(
    instructions: Sequence[Instruction], parcels: Sequence[Parcel], shows: Mapping[Value, Value]
) -> list[_Stretch]:
    """By their first use."""
    own = {value: index for index, parcel in enumerate(parcels) for value in parcel.values}
    of = own | {value: own[shown] for value, shown in shows.items() if shown in own}
    latest: dict[int, _Stretch] = {}
    computed_at: dict[int, int] = {}
    found, computed = [], 0
    for position, instruction in enumerate(instructions):
        computed += isinstance(instruction, Compute)
        changes = {own[value] for value in instruction.writes if value in own}
        for index in dict.fromkeys(of[v] for v in (*instruction.reads, *instruction.writes) if v in of):
            before = latest.get(index)
            near = computed - computed_at.get(index, 0) <= NEARBY
            if before is not None and (near or parcels[index].stays):
                before.last, before.changed = position, before.changed or index in changes
            else:
                latest[index] = _Stretch(
                    parcels[index], position, position, index in changes, before is None,
                    after=-1 if before is None else before.last,
                )  # fmt: skip
                found.append(latest[index])
            computed_at[index] = computed
    for stretch in latest.values():
        stretch.is_last = True
    return found


def _place(stretches: Sequence[_Stretch], places: _Places) -> None:
    """Copies of parcels that share their room; those that stay all have some."""
    coming = [stretch for stretch in stretches if stretch.comes]
    parcels = len({stretch.parcel for stretch in coming})
    count = parcels if stretches[0].parcel.stays else at_hand(parcels)
    for index, stretch in enumerate(coming):
        parcel = stretch.parcel
        free = coming[index - count].last if index >= count else -1
        if index < count and not parcel.lasting:  # not before anybody needs one of its kind
            free = coming[0].first - 1
        at = min(max(free, stretch.after), stretch.first - 1)
        copy = Copy(
            name=f"fetch {parcel.values[0]}", way="in", reads=parcel.stored, writes=parcel.values,
            num_bytes=parcel.num_bytes,
        )  # fmt: skip
        places.fetched.setdefault(at, []).append(copy)
        places.awaited.setdefault(stretch.first, []).append(copy)
    for stretch in stretches:
        parcel = stretch.parcel
        if stretch.leaves:
            copy = Copy(
                name=f"store {parcel.values[0]}", way="out", reads=parcel.values, writes=parcel.stored,
                num_bytes=parcel.num_bytes,
            )  # fmt: skip
        elif stretch.comes:
            copy = Copy(name=f"drop {parcel.values[0]}", way="drop", reads=parcel.values)
        else:
            continue
        places.left.setdefault(stretch.last, []).append(copy)


def _merged(instructions: Sequence[Instruction], places: _Places) -> list[Instruction]:
    made = Rewriter()
    copies: dict[int, int] = {}

    def fetch(position: int) -> None:
        for copy in places.fetched.get(position, ()):
            copies[id(copy)] = made.add(copy)

    fetch(-1)
    for position, instruction in enumerate(instructions):
        for copy in places.awaited.get(position, ()):
            made.add(
                Wait(name=f"wait to {copy.name}", of=copies[id(copy)], reads=copy.writes, writes=copy.writes)
            )
        made.again(instruction)
        for copy in places.left.get(position, ()):
            made.add(copy)
        fetch(position)
    return made.instructions
