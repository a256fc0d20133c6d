"""Messages between processes of one host through memory that they share.

In: bytes for a rank, or room for bytes from one. Out: a message that is there as soon as its sender has written it. The
sender copies its bytes into a region of its own and enters it in a table; the receiver copies them out, or reads them
there, and clears the entry. Messages are found by name, so the order in which they are received does not matter.
Nothing runs in the background; whoever waits sleeps until its bell is rung.
"""

from collections.abc import Callable, Sequence
from zlib import crc32

from torch import Tensor

from plait.errors import RunError
from plait.run.link.shm.bell import Bells
from plait.run.link.shm.memory import TABLE_WORDS, Arena, Region

_SLOT_WORDS = 4
"""The tag of a message (0: none), the offset and the size of its region, its bytes."""
_SLOTS = TABLE_WORDS // _SLOT_WORDS
"""Messages that may wait at one rank: a schedule keeps one a micro-batch and direction in flight, tens at most."""

Wait = Callable[[Callable[[], bool], int, str], None]
"""Until something holds, which a rank must see to: what it is, for errors."""


class Mail:
    """The messages of one rank."""

    def __init__(self, arenas: Sequence[Arena], rank: int, bells: Bells, wait: Wait) -> None:
        self._arenas = arenas
        self._rank = rank
        self._tables = [arena.table for arena in arenas]
        self._bells = bells
        self._wait = wait
        self._under_way: list[tuple[int, Region]] = []
        self._spare: list[Region] = []

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a message for another rank: bytes, part after part."""
        table = self._tables[self._rank]
        self._collect()
        tag = _tag(message, to)
        place = next((p for p in _places(tag) if table[p] == 0), None)
        while place is None:
            self._wait(lambda: self._collect() > 0, to, f"room for {message}")
            place = next((p for p in _places(tag) if table[p] == 0), None)
        num_bytes = sum(part.numel() for part in parts)
        region = self._region(num_bytes)
        start = 0
        for part in parts:
            region.bytes[start : start + part.numel()].copy_(part)
            start += part.numel()
        self._under_way.append((place, region))
        table[place + 1], table[place + 2], table[place + 3] = region.offset, region.size, num_bytes
        table[place] = tag  # last: whoever sees it sees the rest
        self._bells.ring(to)

    def receive(self, message: str, source: int, flat: Tensor) -> Tensor:
        """Wait for a message and copy it to `flat`."""
        table, tag = self._tables[source], _tag(message, self._rank)
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [p for p in _places(tag) if table[p] == tag][:1]
            return bool(found)

        if not is_there():
            self._wait(is_there, source, f"the message {message}")
        place = found[0]
        if table[place + 3] != flat.numel():
            raise RunError(
                f"rank {self._rank} expects {flat.numel()} bytes of {message}, rank {source} sent {table[place + 3]}: "
                "their batches have different shapes.",
                fix="make samples depend on the job's seed alone: every rank of a pipeline reads the batch itself.",
            )
        region = self._arenas[source].region(table[place + 1], table[place + 2])
        flat.copy_(region.bytes[: flat.numel()])
        self._clear(source, place)
        return flat

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Where a message is there: have its bytes used, and forget it. Never waits."""
        table, tag = self._tables[source], _tag(message, self._rank)
        place = next((p for p in _places(tag) if table[p] == tag), None)
        if place is None:
            return False
        region = self._arenas[source].region(table[place + 1], table[place + 2])
        use(region.bytes[: table[place + 3]])
        self._clear(source, place)
        return True

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Wait for a message and have its bytes used; an error where its sender is gone."""
        self._wait(lambda: self.take(message, source, use), source, f"the message {message}")

    def _clear(self, source: int, place: int) -> None:
        """Make room: the sender may wait for it."""
        self._tables[source][place] = 0
        self._bells.ring(source)

    def _collect(self) -> int:
        """Take back the regions of messages that were received; how many."""
        table = self._tables[self._rank]
        kept, before = [], len(self._under_way)
        for place, region in self._under_way:  # each entry is read once: receivers clear them meanwhile
            if table[place] == 0:
                self._spare.append(region)
            else:
                kept.append((place, region))
        self._under_way = kept
        return before - len(kept)

    def _region(self, num_bytes: int) -> Region:
        fitting = [r for r in self._spare if num_bytes <= r.size <= 4 * num_bytes + 65536]
        if fitting:
            region = min(fitting, key=lambda r: r.size)
            self._spare.remove(region)
            return region
        return self._arenas[self._rank].extend(num_bytes)


def _tag(message: str, to: int) -> int:
    return 1 << 62 | to << 32 | crc32(message.encode())


def _places(tag: int) -> list[int]:
    """Where a message may be, first choice first."""
    start = tag * 2654435761 % _SLOTS
    return [_SLOT_WORDS * ((start + i) % _SLOTS) for i in range(16)]
