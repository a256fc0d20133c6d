"""How the ranks of other hosts are reached: a door of this rank's own, and the doors of the others.

In: a token and an address of this host. Out: sockets to other ranks. Of two ranks the lower one dials, when it first
wants something of the other; the other waits without blocking anything. What comes before it is wanted is kept.
"""

import json
import os
import socket
import threading
from dataclasses import dataclass
from typing import Any

from plait.run.wire.door import Address, Door, dial
from plait.run.wire.frames import pack
from plait.run.wire.peers import Peers

_WELCOME = pack({})
"""Sent before the socket is another's to write to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Secret:
    """What a rank that has peers on other hosts is given by its parent, in a file that only it inherits."""

    token: bytes
    host: str
    """The address of this host by which the others reach it."""
    beside: tuple[int, int]
    """The ranks, from and to, that the same switchboard can hand sockets to; equal where there are none."""

    def write(self) -> bytes:
        """As bytes."""
        return json.dumps({"token": self.token.hex(), "host": self.host, "beside": self.beside}).encode()

    @classmethod
    def read(cls, file: int) -> "Secret":
        """From an inherited file, whose position all ranks share."""
        given = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        first, last = given["beside"]
        return cls(token=bytes.fromhex(given["token"]), host=given["host"], beside=(first, last))


class Reach:
    """One rank's sockets to ranks of other hosts."""

    def __init__(self, rank: int, secret: Secret, timeout_s: float) -> None:
        self._rank, self._secret, self._timeout_s = rank, secret, timeout_s
        self._lock = threading.Lock()
        self._peers: dict[str, Peers] = {}
        self._early: dict[str, list[tuple[int, socket.socket]]] = {}
        self._door = Door(secret.host, [0], secret.token, self._receive)

    def close(self) -> None:
        """Listen no more."""
        self._door.close()
        for early in self._early.values():
            for _, made in early:
                made.close()

    @property
    def address(self) -> str:
        """As the others find it in the store."""
        return json.dumps(self._door.address)

    def is_beside(self, peer: int) -> bool:
        """Whether the switchboard has a socket for this rank and that one."""
        first, last = self._secret.beside
        return first <= self._rank < last and first <= peer < last

    def connect(self, key: str, peer: int, address: bytes) -> socket.socket:
        """Dial a higher rank."""
        host, port = json.loads(address)
        where: Address = (str(host), int(port))
        hello = {"key": key, "from": self._rank, "to": peer}
        _, made = dial(where, self._secret.token, hello, timeout_s=self._timeout_s)
        return made

    def attend(self, key: str, peers: Peers) -> None:
        """Sockets under this key are for these peers."""
        with self._lock:
            self._peers[key] = peers
            early = self._early.pop(key, [])
        for rank, made in early:
            peers.attach(rank, made)

    def _receive(self, hello: dict[str, Any], made: socket.socket) -> dict[str, Any] | None:
        key, source = hello.get("key"), hello.get("from")
        if not isinstance(key, str) or not isinstance(source, int) or hello.get("to") != self._rank:
            made.close()
            return None
        made.sendall(_WELCOME)
        with self._lock:
            peers = self._peers.get(key)
            if peers is None:
                self._early.setdefault(key, []).append((source, made))
        if peers is not None:
            peers.attach(source, made)
        return None
