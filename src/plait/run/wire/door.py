"""A listening socket that talks to nobody who does not prove the run's token, and the other side of it.

In: an address, ports to try, a token. Out: sockets to processes of the run, with the JSON in which each says what it
wants. Both sides prove the token by a keyed hash of two fresh numbers and of the port that was dialled: nothing of it
can be used again, nor by somebody who listens at another port and passes it on. Until then a stranger is sent 40 bytes
and listened to for 72, which nobody parses. It never waits for a stranger: one that says nothing is dropped after
seconds, and where too many hold on, those who came first.
"""

import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from secrets import token_bytes
from typing import Any

from plait.errors import RunError
from plait.run.wire.frames import Incoming, pack
from plait.threads import start_thread

_MAGIC = b"plait/1\n"
_NONCE_BYTES = 32
"""Of the fresh number of either side."""
_PROOF_BYTES = 32
"""Of a proof: SHA-256."""
_STRANGER_S = 5.0
"""For which a connection may go without a proof."""
_MOST_STRANGERS = 256
"""Connections without a proof at once; the oldest goes first."""
_SILENCE_MS = 6000
"""After which a host that acknowledges nothing is taken for lost. Its kernel does that, however busy the host is; what
follows must fit in the 10 s within which everybody is gone: a probe, an echo, files, the end of ranks."""
_MOST_HELLO_BYTES = 1 << 16
"""Of the first message of a process of the run."""

Address = tuple[str, int]
Receive = Callable[[dict[str, Any], socket.socket], dict[str, Any] | None]
"""Is given what a process of the run wants and the socket to it, which it then owns; returns what to answer, or None
where it has answered or will."""


class StrangerError(ConnectionError):
    """Whoever listens there does not know the token."""


class UnreachedError(ConnectionError):
    """Nothing comes back from there, not even that nobody listens."""


@dataclass(kw_only=True, slots=True)
class _Guest:
    """A connection that has not said what it wants."""

    socket: socket.socket
    since: float
    nonce: bytes = field(default_factory=lambda: token_bytes(_NONCE_BYTES))
    read: bytearray = field(default_factory=bytearray)
    is_known: bool = False
    incoming: Incoming = field(default_factory=Incoming)


class Door:
    """Listens in a thread of its own, from the start to `close`."""

    def __init__(self, host: str, ports: Iterable[int], token: bytes, receive: Receive) -> None:
        self._token = token
        self._receive = receive
        self._socket = _bound(host, ports)
        self.address: Address = self._socket.getsockname()[:2]
        self.turned_away = 0
        """Connections that did not prove the token."""
        self._guests: dict[int, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._ends, self._wake = socket.socketpair()
        self._selector.register(self._ends, selectors.EVENT_READ, None)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._attend, name="plait door", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Listen no more; sockets that were handed on stay."""
        with suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()
        self._selector.close()
        for end in (self._socket, self._ends, self._wake, *(g.socket for g in self._guests.values())):
            end.close()

    def _attend(self) -> None:
        while True:
            first = next(iter(self._guests.values()), None)  # who has been here longest
            patience_s = None if first is None else max(0.0, first.since + _STRANGER_S - time.monotonic())
            for key, _ in self._selector.select(patience_s):
                if key.fileobj is self._ends:
                    return
                if key.fileobj is self._socket:
                    self._let_in()
                else:
                    self._hear(key.data)
            now = time.monotonic()
            for guest in [guest for guest in self._guests.values() if now - guest.since >= _STRANGER_S]:
                self._turn_away(guest)

    def _let_in(self) -> None:
        try:
            made, _ = self._socket.accept()
        except OSError:  # gone again, or no descriptors are left
            return
        made.setblocking(False)
        guest = _Guest(socket=made, since=time.monotonic())
        if len(self._guests) >= _MOST_STRANGERS:
            self._turn_away(next(iter(self._guests.values())))
        self._guests[made.fileno()] = guest
        self._selector.register(made, selectors.EVENT_READ, guest)
        try:
            made.send(_MAGIC + guest.nonce)
        except OSError:
            self._turn_away(guest)

    def _hear(self, guest: _Guest) -> None:
        try:
            if not guest.is_known:
                self._hear_proof(guest)
            else:
                self._hear_hello(guest)
        except BlockingIOError:
            return
        except (OSError, RunError):
            self._turn_away(guest)

    def _hear_proof(self, guest: _Guest) -> None:
        wanted = len(_MAGIC) + _NONCE_BYTES + _PROOF_BYTES
        piece = guest.socket.recv(wanted - len(guest.read))
        guest.read += piece
        if not piece or not (bytes(guest.read[: len(_MAGIC)]) == _MAGIC[: len(guest.read)]):
            raise ConnectionError("no process of a run")
        if len(guest.read) < wanted:
            return
        nonce, proof = (
            bytes(guest.read[len(_MAGIC) : -_PROOF_BYTES]),
            bytes(guest.read[-_PROOF_BYTES:]),
        )
        if not hmac.compare_digest(proof, _proof(self._token, b"guest", self.address, guest.nonce, nonce)):
            raise ConnectionError("another token")
        guest.is_known = True
        guest.socket.send(_proof(self._token, b"host", self.address, guest.nonce, nonce))

    def _hear_hello(self, guest: _Guest) -> None:
        piece = guest.socket.recv(_MOST_HELLO_BYTES)
        if not piece:
            raise ConnectionError("closed")
        guest.read += piece
        found = guest.incoming.feed(piece)
        if not found:
            if len(guest.read) > 2 * _MOST_HELLO_BYTES:
                raise ConnectionError("too long")
            return
        self._forget(guest)
        guest.socket.setblocking(True)
        tune(guest.socket)
        answer = self._receive(found[0][0], guest.socket)
        if answer is not None:
            guest.socket.sendall(pack(answer))
            if "refused" in answer:
                guest.socket.close()

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.socket.fileno()]
        self._selector.unregister(guest.socket)

    def _turn_away(self, guest: _Guest) -> None:
        if guest.socket.fileno() in self._guests:
            self._forget(guest)
            self.turned_away += 0 if guest.is_known else 1
        guest.socket.close()


def dial(
    address: Address, token: bytes, hello: dict[str, Any], *, timeout_s: float, source: str | None = None
) -> tuple[dict[str, Any], socket.socket]:
    """Reach a door, prove the token, have it proven, say what is wanted; returns the answer and the socket.

    `source`: the address of this host to come from.
    """
    try:
        made = socket.create_connection(
            address, timeout=min(timeout_s, _STRANGER_S), source_address=(source, 0) if source else None
        )
    except ConnectionError:
        raise
    except OSError as error:
        raise UnreachedError(error.strerror or str(error)) from error
    try:
        greeting = _read(made, len(_MAGIC) + _NONCE_BYTES)
        if not greeting.startswith(_MAGIC):
            raise StrangerError(f"who listens at {address[0]}:{address[1]} is no process of a run")
        theirs, own = greeting[len(_MAGIC) :], token_bytes(_NONCE_BYTES)
        made.sendall(_MAGIC + own + _proof(token, b"guest", address, theirs, own))
        if not hmac.compare_digest(_read(made, _PROOF_BYTES), _proof(token, b"host", address, theirs, own)):
            raise StrangerError(f"who listens at {address[0]}:{address[1]} does not know the token")
        made.settimeout(timeout_s)
        made.sendall(pack(hello))
        answer = read_message(made)
        made.settimeout(None)
        tune(made)
    except BaseException:
        made.close()
        raise
    return answer, made


def read_message(source: socket.socket) -> dict[str, Any]:
    """One head without a body, and not a byte of what follows."""
    sizes = _read(source, struct.calcsize("<IQ"))
    incoming = Incoming()
    incoming.feed(sizes)
    head_bytes, body_bytes = struct.unpack("<IQ", sizes)
    if body_bytes:
        raise RunError(f"an answer with {body_bytes} bytes behind it was not expected.")
    return incoming.feed(_read(source, head_bytes))[0][0]


def tune(made: socket.socket) -> None:
    """Small messages at once, and a host that does not answer any more is noticed by the kernel."""
    if made.family not in (socket.AF_INET, socket.AF_INET6):
        return
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", _SILENCE_MS),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(token: bytes, side: bytes, address: Address, host_nonce: bytes, guest_nonce: bytes) -> bytes:
    """Of the address the port alone: a host may have several."""
    return hmac.new(token, b"%b %d %b" % (side, address[1], host_nonce + guest_nonce), sha256).digest()


def _read(source: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = source.recv(count - len(found))
        if not piece:
            raise ConnectionError("connection closed")
        found += piece
    return bytes(found)


def _bound(host: str, ports: Iterable[int]) -> socket.socket:
    """Listening at the first of the ports that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last: OSError | None = None
    for port in ports:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
            made.listen(512)
        except OSError as error:
            made.close()
            last = error
        else:
            return made
    raise RunError(
        f"this process cannot listen at {host}: {last.strerror if last is not None else 'no port was given'}.",
        fix="name an address of this host by which the others reach it: PLAIT_ADDRESS=10.0.0.1.",
    )
