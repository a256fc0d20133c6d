"""Tagged messages between any two ranks, over sockets that one thread of this process attends to.

In: bytes for a rank, or room for bytes from one. Out: futures. A message is found by its tag, so the order in which two
ranks ask does not matter; what comes early is kept (`inbox.py`). It never copies what goes straight from and to the
caller's memory.
"""

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from plait.errors import RunError
from plait.program.cost.collective_time import SLOW_BYTES_PER_S
from plait.run.wire.emulate import Passage, Wire
from plait.run.wire.inbox import HEAD, Done, Inbox
from plait.run.wire.rate import bytes_per_s
from plait.run.wire.signature import ANY
from plait.threads import or_end_the_rank, start_thread

_BURST_BYTES = 1 << 20
"""Sent or read at once before the next peer is looked at."""
_FLUSH_S = 5.0
"""For which a rank that ends waits until what it sent is read."""

Connect = Callable[[int], socket.socket | None]
"""This process's end of a socket to a rank; None where the other side brings it (`Peers.attach`)."""


@dataclass(kw_only=True, slots=True)
class _Peer:
    """What is under way with one rank."""

    rank: int
    socket: socket.socket | None
    """None until the other side has brought it; what is to be sent waits."""
    inbox: Inbox
    outgoing: deque[tuple[memoryview, Done | None]] = field(default_factory=deque)
    error: Exception | None = None
    passage: Passage | None = None
    """Of an emulated network: what of `outgoing` may leave now."""

    @property
    def may_send(self) -> bool:
        """Whether something waits that only the socket can hold back."""
        ready = self.passage is None or self.passage.open_bytes > 0
        return bool(self.outgoing) and ready and self.error is None and self.socket is not None


class Peers:
    """All sockets of this process to other ranks; made when they are first needed."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._ends, self._wake = socket.socketpair()
        self._ends.setblocking(False)
        self._selector.register(self._ends, selectors.EVENT_READ, None)
        self.is_closed = False
        self._wire: Wire | None = None
        self._paced = threading.Event()
        self._thread = threading.Thread(target=or_end_the_rank(self._attend), name="plait peers", daemon=True)
        start_thread(self._thread)

    def emulate(self, wire: Wire) -> None:
        """From here on, bytes for ranks beyond the wire leave when they would have passed it."""
        with self._lock:
            self._wire = wire
            for peer in self._peers.values():
                self._place(peer)
        start_thread(threading.Thread(target=or_end_the_rank(self._pace), name="plait wire", daemon=True))

    def _place(self, peer: _Peer) -> None:
        if self._wire is not None and self._wire.is_crossed(peer.rank):
            peer.passage = Passage(self._wire, peer.rank)

    def _pace(self) -> None:
        """Send what has passed the wire, as soon as it has."""
        while not self.is_closed:
            self._paced.clear()
            with self._lock:
                paced = [peer for peer in self._peers.values() if peer.passage is not None]
                for peer in paced:
                    if peer.outgoing and peer.error is None and peer.socket is not None:
                        self._push(peer)
                        if peer.may_send:
                            self._wake.send(b"\0")
                moments = [
                    peer.passage.next_s for peer in paced if peer.outgoing and peer.passage is not None
                ]
            known = [moment for moment in moments if moment is not None]
            self._paced.wait(max(0.0, min(known) - time.monotonic()) if known else None)

    def send(self, to: int, tag: int, data: memoryview, sign: int = ANY) -> Done:
        """Send bytes, which nobody may change before the future is done."""
        done: Done = Future()
        with self._lock:
            peer = self._peer(to)
            if peer.error is not None:
                done.set_exception(peer.error)
                return done
            idle = not peer.outgoing
            peer.outgoing.append((memoryview(HEAD.pack(tag, len(data), sign)), None if len(data) else done))
            if len(data):
                peer.outgoing.append((data, done))
            if peer.passage is not None:
                self._paced.set()
            elif idle and peer.socket is not None:
                self._push(peer)
                if peer.outgoing:
                    self._wake.send(b"\0")
        return done

    def receive(self, source: int, tag: int, room: memoryview, sign: int = ANY) -> Done:
        """Have a message of exactly this size put into `room`, which belongs to what `sign` says."""
        done: Done = Future()
        with self._lock:
            peer = self._peer(source)
            if peer.inbox.has(tag):
                peer.inbox.fill(tag, room, sign, done)
            elif peer.error is not None:
                done.set_exception(peer.error)
            else:
                peer.inbox.ask(tag, room, sign, done)
        return done

    def is_slow(self, rank: int) -> bool:
        """Whether a socket to a rank is known to take fewer bytes a second than processors can pack."""
        with self._lock:
            peer = self._peer(rank)
            if peer.passage is not None and self._wire is not None:
                return self._wire.bandwidth < SLOW_BYTES_PER_S
            rate = None if peer.socket is None else bytes_per_s(peer.socket)
            return rate is not None and rate < SLOW_BYTES_PER_S

    def close(self) -> None:
        """Let go, once what was to be sent has left."""
        deadline = time.monotonic() + _FLUSH_S
        while time.monotonic() < deadline:
            with self._lock:
                live = [
                    peer for peer in self._peers.values() if peer.error is None and peer.socket is not None
                ]
                if not any(peer.outgoing for peer in live):
                    break
            time.sleep(0.002)
        if self.is_closed:
            return
        self.is_closed = True
        self._wake.send(b"\0")
        self._paced.set()
        self._thread.join()
        self._selector.close()
        for end in (self._ends, self._wake, *(peer.socket for peer in self._peers.values())):
            if end is not None:
                end.close()

    def attach(self, rank: int, made: socket.socket) -> None:
        """The other side has brought the socket to a rank."""
        with self._lock:
            peer = self._peers.get(rank) or self._new(rank, None)
            if self.is_closed or peer.socket is not None:
                made.close()
                return
            peer.socket = made
            self._register(peer)
            self._push(peer)

    def take(self, source: int, tag: int) -> bytearray | None:
        """A message that has come, whatever its size; None where it has not. Never waits."""
        with self._lock:
            peer = self._peer(source)
            return peer.inbox.take(tag)[0] if peer.inbox.has(tag) else None

    def lost(self, source: int) -> Exception | None:
        """Why nothing more comes from a rank; None: it may."""
        with self._lock:
            peer = self._peers.get(source)
            return None if peer is None else peer.error

    def _peer(self, rank: int) -> _Peer:
        if rank not in self._peers:
            peer = self._new(rank, self._connect(rank))
            if peer.socket is not None:
                self._register(peer)
        return self._peers[rank]

    def _new(self, rank: int, made: socket.socket | None) -> _Peer:
        peer = self._peers[rank] = _Peer(rank=rank, socket=made, inbox=Inbox(rank))
        self._place(peer)
        return peer

    def _register(self, peer: _Peer) -> None:
        assert peer.socket is not None
        peer.socket.setblocking(False)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._wake.send(b"\0")

    def _attend(self) -> None:
        while not self.is_closed:
            for key, events in self._selector.select():
                if key.data is None:
                    with suppress(BlockingIOError):
                        self._ends.recv(4096)
                    continue
                with self._lock:
                    self._serve(key.data, events)
            with self._lock:
                for peer in self._peers.values():
                    if peer.may_send:
                        self._watch(peer)

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.error is not None:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._push(peer)
                self._watch(peer)
            if events & selectors.EVENT_READ:
                self._pull(peer)
        except BlockingIOError:
            pass
        except (OSError, RunError, MemoryError) as error:
            self._lose(peer, error)

    def _watch(self, peer: _Peer) -> None:
        assert peer.socket is not None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.may_send else 0)
        self._selector.modify(peer.socket, events, peer)

    def _push(self, peer: _Peer) -> None:
        """Send what the socket takes now."""
        assert peer.socket is not None
        passage = peer.passage
        if passage is not None:
            passage.look(sum(len(rest) for rest, _ in peer.outgoing))
        try:
            while peer.outgoing and (passage is None or passage.open_bytes):
                rest, done = peer.outgoing[0]
                sent = peer.socket.send(
                    rest[: _BURST_BYTES if passage is None else min(_BURST_BYTES, passage.open_bytes)]
                )
                if passage is not None:
                    passage.open_bytes -= sent
                if sent < len(rest):
                    peer.outgoing[0] = (rest[sent:], done)
                    continue
                peer.outgoing.popleft()
                if done is not None:
                    done.set_result(None)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(peer, error)

    def _pull(self, peer: _Peer) -> None:
        """Take in what has come, at most a burst of it, so that no rank keeps the others waiting."""
        assert peer.socket is not None
        budget = _BURST_BYTES
        while budget > 0:
            count = peer.socket.recv_into(peer.inbox.rest)
            if not count:
                raise ConnectionError("connection closed")
            if peer.inbox.came(count):
                budget -= count

    def _lose(self, peer: _Peer, error: Exception) -> None:
        """Nothing more goes to or comes from a rank."""
        peer.error = ConnectionError(f"the connection to rank {peer.rank} is lost: {error}.")
        if peer.socket is not None:
            self._selector.unregister(peer.socket)
        waiting = peer.inbox.lose() + [done for _, done in peer.outgoing if done is not None]
        peer.outgoing.clear()
        for done in waiting:
            done.set_exception(peer.error)
