"""The parent's side of a run's communication: a key-value store, and a socket for any two ranks that want one.

In: one socket for each rank, which it inherited. Out: answers on them. Nothing listens and nothing has a name, so no
process can reach it but those to which a descriptor was handed down: not another user, not even one who knows all
about the run. It never waits for a rank: one that does not read keeps nobody else waiting.
"""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from socket import socket as Socket
from typing import Any

from plait.errors import RunError
from plait.run.wire.frames import Incoming, pack
from plait.threads import MEMORY_FIX, start_thread

_READ_BYTES = 1 << 18
"""Read at once from one rank."""
LONGEST_WAIT_S = 0.2
"""A request to wait is answered after this time at the latest; the asker repeats it."""


@dataclass(kw_only=True, slots=True)
class _Line:
    """One rank's socket."""

    rank: int
    socket: Socket
    incoming: Incoming = field(default_factory=Incoming)
    outgoing: deque[tuple[memoryview, Socket | None]] = field(default_factory=deque)
    """What is to be sent, and the socket that goes with its first byte."""
    waits: tuple[tuple[str, ...], float] | None = None
    """Keys that it waits for, and until when."""


class Switchboard:
    """Serves all ranks from one thread of its own, from `start` to `close`."""

    def __init__(self, lines: Sequence[socket.socket]) -> None:
        self._lines = [_Line(rank=rank, socket=line) for rank, line in enumerate(lines)]
        self._num_local = len(lines)
        """Ranks of this host, from 0 on: sockets can be handed to them."""
        self._coming: deque[_Line] = deque()
        self._values: dict[str, bytes] = {}
        self._pairs: dict[tuple[str, int], socket.socket] = {}
        """Ends of sockets that were made for a rank which has not asked for them yet."""
        self._selector = selectors.DefaultSelector()
        self._ends, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="plait switchboard", daemon=True)

    def start(self) -> None:
        """Begin to answer; after the forks, which take no threads along."""
        self._selector.register(self._ends, selectors.EVENT_READ, None)
        for line in self._lines:
            line.socket.setblocking(False)
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        start_thread(self._thread)

    def check(self) -> None:
        """Raise where nobody answers any more: ranks would ask in vain."""
        if not self._thread.is_alive():
            raise RunError(
                "the thread that connects the ranks has died: this process has no memory left.",
                fix=MEMORY_FIX,
            )

    def add(self, rank: int, line: socket.socket) -> None:
        """The line of a rank on another host, which has proven that it belongs to the run."""
        self._coming.append(_Line(rank=rank, socket=line))
        self._wake.send(b"\0")

    def close(self) -> None:
        """End; ranks that still ask find their line closed."""
        self._wake.close()
        if self._thread.is_alive():
            self._thread.join()
        self._selector.close()
        for end in (
            self._ends,
            *self._pairs.values(),
            *(line.socket for line in (*self._lines, *self._coming)),
        ):
            end.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._selector.select(self._patience_s()):
                if key.data is None:
                    if not self._ends.recv(4096):
                        return
                    self._take_in()
                    continue
                self._attend(key.data, events)
            self._answer_waits()

    def _take_in(self) -> None:
        while self._coming:
            line = self._coming.popleft()
            line.socket.setblocking(False)
            self._lines.append(line)
            self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _patience_s(self) -> float | None:
        until = [line.waits[1] for line in self._lines if line.waits is not None]
        return max(0.0, min(until) - time.monotonic()) if until else None

    def _attend(self, line: _Line, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._push(line)
            if events & selectors.EVENT_READ:
                piece = line.socket.recv(_READ_BYTES)
                if not piece:
                    raise ConnectionError("closed")
                for head, body in line.incoming.feed(piece):
                    self._answer(line, head, body)
        except BlockingIOError:
            return
        except (OSError, RunError, KeyError, TypeError, ValueError):  # it is gone, or talks nonsense
            self._drop(line)

    def _drop(self, line: _Line) -> None:
        if line.socket.fileno() < 0:
            return
        self._selector.unregister(line.socket)
        line.socket.close()
        line.waits = None
        for key in [key for key in self._pairs if key[1] == line.rank]:
            self._pairs.pop(key).close()  # whoever has the other end sees that nobody will come

    def _answer(self, line: _Line, head: Mapping[str, Any], body: bytes) -> None:
        op = head["op"]
        if op == "wait":
            keys = tuple(str(key) for key in head["keys"])
            line.waits = (keys, time.monotonic() + min(float(head["for_s"]), LONGEST_WAIT_S))
        elif op == "pair":
            self._send(line, {}, passed=self._pair(line.rank, str(head["key"]), int(head["peer"])))
        else:
            self._send(line, *self._operate(op, head, body))

    def _operate(self, op: str, head: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        values = self._values
        if op == "check":
            return {"is_there": all(key in values for key in head["keys"])}, b""
        if op == "count":
            return {"count": len(values)}, b""
        key = str(head["key"])
        if op == "get":
            return {"is_there": key in values}, values.get(key, b"")
        if op == "set":
            values[key] = body
        elif op == "add":
            values[key] = str(int(values.get(key, b"0")) + int(head["amount"])).encode()
            return {"number": int(values[key])}, b""
        elif op == "delete":
            return {"was_there": values.pop(key, None) is not None}, b""
        elif op == "exchange":
            expected = body[: int(head["expected_bytes"])]
            if values.get(key, b"") == expected:
                values[key] = body[len(expected) :]
            return {}, values.get(key, expected)
        else:
            raise ValueError(op)
        return {}, b""

    def _pair(self, rank: int, key: str, peer: int) -> socket.socket:
        """This rank's end of the socket that it and `peer` ask for under one key."""
        if not 0 <= peer < self._num_local or rank >= self._num_local or peer == rank:
            raise ValueError(peer)
        between = f"{key} {min(rank, peer)} {max(rank, peer)}"
        if (between, rank) in self._pairs:
            return self._pairs.pop((between, rank))
        own, other = socket.socketpair()
        if self._lines[peer].socket.fileno() < 0:
            other.close()  # it is gone, and will not ask
        else:
            self._pairs[between, peer] = other
        return own

    def _answer_waits(self) -> None:
        now = time.monotonic()
        for line in self._lines:
            if line.waits is None:
                continue
            keys, until = line.waits
            is_there = all(key in self._values for key in keys)
            if is_there or now >= until:
                line.waits = None
                self._send(line, {"is_there": is_there})

    def _send(
        self, line: _Line, head: dict[str, Any], body: bytes = b"", passed: Socket | None = None
    ) -> None:
        line.outgoing.append((memoryview(pack(head, body)), passed))
        try:
            self._push(line)
        except OSError:
            self._drop(line)

    def _push(self, line: _Line) -> None:
        """Send as much as the socket takes; the rest when it takes more."""
        while line.outgoing:
            rest, passed = line.outgoing[0]
            try:
                if passed is not None:
                    sent = socket.send_fds(line.socket, [rest], [passed.fileno()])
                    passed.close()
                else:
                    sent = line.socket.send(rest)
            except BlockingIOError:
                break
            if sent < len(rest):
                line.outgoing[0] = (rest[sent:], None)
            else:
                line.outgoing.popleft()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.outgoing else 0)
        self._selector.modify(line.socket, events, line)
