"""A rank's side of the switchboard: the run's key-value store, as torch.distributed takes one, and sockets to peers.

In: the descriptor that this process inherited. Out: `RunStore`. Only processes of the run have such a descriptor.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from plait.errors import RunError
from plait.run.wire.frames import Incoming, pack
from plait.run.wire.peers import Peers
from plait.run.wire.reach import Reach
from plait.run.wire.switchboard import LONGEST_WAIT_S

_READ_BYTES = 1 << 18
"""Read at once from one rank."""

Meeting = Callable[[str], AbstractContextManager[None]]
"""Entered for as long as this rank waits for others in something that has a name."""


class RunStore(Store):
    """The store of this run. One request at a time; waiting is a row of short requests, so threads can share it."""

    def __init__(
        self,
        line: int,
        rank: int,
        timeout_s: float = 300.0,
        meeting: Meeting = lambda what: nullcontext(),
        reach: Reach | None = None,
    ) -> None:
        """`reach`: the way to ranks of other hosts, where there are any."""
        super().__init__()
        self.rank = rank
        self.meeting = meeting
        self._socket = socket.socket(fileno=line)
        self._incoming = Incoming()
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._peers: Peers | None = None
        self.reach = reach
        if reach is not None:
            self.set(_door_of(rank), reach.address)
        self.connections = 0
        """How often this process has joined the others: the same number on all of them when they meet."""

    def peers(self) -> Peers:
        """This process's sockets to all others, new ones after the last were closed."""
        if self._peers is None or self._peers.is_closed:
            key = f"peers {self.connections}"
            self._peers = Peers(lambda peer: self._connect(key, peer))
            if self.reach is not None:
                self.reach.attend(key, self._peers)
        return self._peers

    def _connect(self, key: str, peer: int) -> socket.socket | None:
        """A socket to a rank: from the switchboard, by dialing, or None where the other one dials."""
        if self.reach is None or self.reach.is_beside(peer):
            return self.pair(key, peer)
        return self.reach.connect(key, peer, self.get(_door_of(peer))) if self.rank < peer else None

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        if self.reach is not None:
            self.reach.close()

    def pair(self, key: str, peer: int) -> socket.socket:
        """This rank's end of a socket to `peer`, who asks for it with the same key; does not wait for that."""
        _, _, passed = self._ask({"op": "pair", "key": key, "peer": peer})
        assert passed is not None, "the switchboard answered without a socket"
        return passed

    def _ask(
        self, head: dict[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytes, socket.socket | None]:
        with self._lock:
            try:
                self._socket.sendall(pack(head, body))
                passed: socket.socket | None = None
                while True:
                    piece, files, _, _ = socket.recv_fds(self._socket, _READ_BYTES, 1)
                    if not piece:
                        raise ConnectionError("closed")
                    for file in files:
                        os.set_inheritable(file, False)
                        passed = socket.socket(fileno=file)
                    if found := self._incoming.feed(piece):
                        return *found[0], passed
            except OSError as error:
                raise ConnectionError(
                    f"the parent of this run is gone: connection closed ({error})."
                ) from error

    # What follows overrides torch's names.
    def set(self, key: str, value: str | bytes) -> None:
        """Leave a value."""
        self._ask({"op": "set", "key": key}, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self._until([key], self._timeout_s)
        head, body, _ = self._ask({"op": "get", "key": key})
        if not head["is_there"]:
            raise RunError(f"the run's store lost {key!r} while it was read.")
        return body

    def add(self, key: str, amount: int) -> int:
        """Count, and tell the new number; over all ranks each number is told once."""
        return int(self._ask({"op": "add", "key": key, "amount": amount})[0]["number"])

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys have values; never waits."""
        return bool(self._ask({"op": "check", "keys": list(keys)})[0]["is_there"])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._until(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value where it is as expected; returns what is there then."""
        before = _as_bytes(expected)
        head = {"op": "exchange", "key": key, "expected_bytes": len(before)}
        return self._ask(head, before + _as_bytes(desired))[1]

    def delete_key(self, key: str) -> bool:
        """Forget a value; whether there was one."""
        return bool(self._ask({"op": "delete", "key": key})[0]["was_there"])

    def num_keys(self) -> int:
        """How many values there are."""
        return int(self._ask({"op": "count"})[0]["count"])

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return timedelta(seconds=self._timeout_s)

    def _until(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self.meeting("meet the other ranks"):
            while not self._ask({"op": "wait", "keys": list(keys), "for_s": LONGEST_WAIT_S})[0]["is_there"]:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"{', '.join(keys)} did not come within {timeout_s:g} s: timed out."
                    )


def _door_of(rank: int) -> str:
    """The key under which a rank says where others reach it."""
    return f"door {rank}"


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
