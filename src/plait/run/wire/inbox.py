"""Messages from one rank, found by their tags: what somebody asked for, and what came before anybody did.

In: room for a message, and bytes as they come off a socket. Out: futures that are done once their room is full. A
message of another size than the room, or of another operation or dtype, is an error, never a write. It reads no socket.
"""

import struct
from collections import deque
from concurrent.futures import Future
from typing import TypeVar

from plait.errors import RunError
from plait.run.wire.frames import check_sizes
from plait.run.wire.signature import ANY, PACKED, told

T = TypeVar("T")

Done = Future[bytearray | None]
"""A message under way: with nothing once it is where it should be; with its bytes where these are packed."""
HEAD = struct.Struct("<QQI")
"""Tag, bytes, what it belongs to (`signature.py`)."""


class Inbox:
    """What comes from one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rooms: dict[int, deque[tuple[memoryview, int, Done]]] = {}
        """Receives that were asked for, by tag, with what they belong to."""
        self._early: dict[int, deque[tuple[bytearray, int]]] = {}
        """Messages that came before somebody asked; alike."""
        self._head, self._tag, self._sign = bytearray(HEAD.size), 0, ANY
        self._body: Done | bytearray | None = None
        """Who is told when the message is there; or itself, where nobody has asked yet; None while a head comes in."""
        self.rest = memoryview(self._head)
        """Where the next bytes go."""

    def ask(self, tag: int, room: memoryview, sign: int, done: Done) -> None:
        """Have a message of exactly this size put into `room`, which belongs to what `sign` says."""
        self._rooms.setdefault(tag, deque()).append((room, sign, done))

    def has(self, tag: int) -> bool:
        """Whether a message has come that nobody asked for."""
        return tag in self._early

    def take(self, tag: int) -> tuple[bytearray, int]:
        """That message, and what it belongs to."""
        return _first(self._early, tag)

    def fill(self, tag: int, room: memoryview, sign: int, done: Done) -> None:
        """Put that message into `room`."""
        self._deliver(*self.take(tag), room, sign, done)

    def came(self, count: int) -> bool:
        """So many bytes are in `rest`; whether they were of a message, not of its head."""
        self.rest = self.rest[count:]
        in_body = self._body is not None
        if not len(self.rest):
            self._end() if in_body else self._begin()
        return in_body

    def lose(self) -> list[Done]:
        """Nothing more comes: those who wait in vain."""
        waiting = [done for rooms in self._rooms.values() for _, _, done in rooms]
        if isinstance(self._body, Future):
            waiting.append(self._body)
        self._rooms.clear()
        return waiting

    def _begin(self) -> None:
        """A head is there: find the room for what follows."""
        self._tag, num_bytes, self._sign = HEAD.unpack(self._head)
        check_sizes(0, num_bytes)
        if self._tag in self._rooms and not self._sign & PACKED:
            room, sign, done = _first(self._rooms, self._tag)
            if self._fits(num_bytes, self._sign, room, sign, done):
                self.rest, self._body = room, done
        if self._body is None:  # early, packed, or of the wrong size: then it is forgotten with the run
            self._body = bytearray(num_bytes)
            self.rest = memoryview(self._body)
        if not num_bytes:
            self._end()

    def _end(self) -> None:
        body, self._body, self.rest = self._body, None, memoryview(self._head)
        assert body is not None
        if isinstance(body, Future):
            body.set_result(None)
        elif self._tag in self._rooms:  # somebody asked while it was coming in
            self._deliver(body, self._sign, *_first(self._rooms, self._tag))
        else:
            self._early.setdefault(self._tag, deque()).append((body, self._sign))

    def _deliver(self, message: bytearray, of: int, room: memoryview, sign: int, done: Done) -> None:
        if self._fits(len(message), of, room, sign, done):
            if not of & PACKED:
                room[:] = message
            done.set_result(message if of & PACKED else None)

    def _fits(self, num_bytes: int, sign: int, room: memoryview, wanted: int, done: Done) -> bool:
        if (num_bytes, sign) == (len(room), wanted & ~PACKED):
            return True
        if sign & PACKED and sign == wanted and num_bytes < len(room):
            return True
        done.set_exception(
            RunError(
                f"rank {self._rank} sent {told(sign, num_bytes)} where {told(wanted, len(room))} were expected: the "
                "ranks do not do the same.",
                fix="make samples and the model depend on the job's seed alone.",
            )
        )
        return False


def _first(queues: dict[int, deque[T]], tag: int) -> T:
    found = queues[tag].popleft()
    if not queues[tag]:
        del queues[tag]
    return found
