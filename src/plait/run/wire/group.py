"""torch.distributed between processes of a run, over sockets that nobody else can reach.

In: CPU or device tensors. Out: what torch's own groups give, summed in the order of ranks, so every rank has the same
bits. torch's gloo is not used: its listening ports take anybody who guesses a small number, and what it does not know
it waits for.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import PlanError
from plait.program.cost.collective_time import SMALL_BYTES
from plait.run.wire.inbox import Done
from plait.run.wire.packed import LEAST_BYTES, pack, unpack
from plait.run.wire.peers import Peers
from plait.run.wire.signature import PACKED, signature
from plait.run.wire.store import Meeting, RunStore
from plait.run.wire.turns import InTurns, Turns

BACKEND = "plait"
_DIRECT = 1 << 31
"""Bit of a tag: a message of the caller's, not of a collective."""
_COMBINE: tuple[tuple[Any, Callable[..., Tensor], str], ...] = (
    (dist.ReduceOp.SUM, torch.add, "sum"),
    (dist.ReduceOp.AVG, torch.add, "avg"),
    (dist.ReduceOp.MAX, torch.maximum, "max"),
    (dist.ReduceOp.MIN, torch.minimum, "min"),
    (dist.ReduceOp.PRODUCT, torch.mul, "product"),
)
"""Rows, not a mapping: torch's operators compare, but have no equal hashes."""
_Tag = tuple[int, int]
"""By which the messages of a collective are found, and what they belong to."""


class _Work(dist.Work):
    """An operation under way."""

    def __init__(
        self, done: "Future[Any]", finish: Callable[[], None], what: str, timeout_s: float, meeting: Meeting
    ) -> None:
        super().__init__()
        self._done, self._finish, self._what = done, finish, what
        self._timeout_s, self._meeting = timeout_s, meeting
        self._finished = False

    def is_completed(self) -> bool:
        return self._done.done()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or self._timeout_s
        try:
            if self._done.done():
                self._done.result()
            else:
                with self._meeting(self._what):
                    self._done.result(limit_s)
        except FutureTimeout:
            if self._done.done():
                raise
            raise ConnectionError(f"{self._what} did not end within {limit_s:g} s: timed out.") from None
        if not self._finished:
            self._finished = True
            self._finish()
        return True


class PlaitGroup(dist.ProcessGroup):
    """The ranks of one group; collectives are moved on by a thread of its own, messages go at once."""

    def __init__(
        self, peers: Peers, name: str, rank: int, ranks: Sequence[int], timeout_s: float, meeting: Meeting
    ) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.peers = peers
        self._own = rank
        self._ranks = tuple(ranks)
        self._space = crc32(name.encode()) << 32
        self._timeout_s = timeout_s
        self._meeting = meeting
        self._count = 0
        self._turns = InTurns(name, self._ranks, timeout_s)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def close(self) -> None:
        """End the thread; what is under way is finished first."""
        self._turns.close()

    def shutdown(self) -> None:
        """As torch calls it when a group is destroyed."""
        self.close()

    abort = shutdown

    def _start(
        self,
        what: str,
        dtype: torch.dtype,
        run: Callable[[_Tag], Turns],
        finish: Callable[[], None] = lambda: None,
        op: Any = None,
    ) -> _Work:
        """Queue a collective; `run` gets its tag, with a number that is the same on every rank."""
        self._count = (self._count + 1) % _DIRECT
        reduced = next((name for known, _, name in _COMBINE if op is not None and op == known), "")
        may_be_packed = PACKED if dtype == torch.float32 else 0
        tag = self._space | self._count, signature(what, dtype, reduced) | may_be_packed
        done = self._turns.start(what, run(tag))
        # Twice: where nothing comes for so long, that is told by who knows who is missing.
        return _Work(done, finish, what, 2 * self._timeout_s, self._meeting)

    def _exchange(
        self, tag: _Tag, sent: Sequence[memoryview | None], rooms: Sequence[memoryview | None]
    ) -> Turns:
        """Send to and receive from each other rank of the group; None: nothing."""
        waits: list[tuple[int, Done]] = []
        coming: list[tuple[Done, memoryview]] = []
        for peer, room in enumerate(rooms):
            if room is not None and peer != self._own:
                coming.append((self.peers.receive(self._ranks[peer], tag[0], room, tag[1]), room))
                waits.append((peer, coming[-1][0]))
        for offset in range(1, len(self._ranks)):
            peer = (self._own + offset) % len(self._ranks)
            data = sent[peer]
            if data is not None:
                waits.append((peer, self._send(self._ranks[peer], tag, data)))
        yield waits
        for done, room in coming:
            packed = done.result()
            if packed is not None:
                unpack(packed, room)

    def _send(self, rank: int, tag: _Tag, data: memoryview) -> Done:
        """In fewer bytes, where that is less than the wire takes for the others."""
        number, sign = tag
        may = sign & PACKED and len(data) >= LEAST_BYTES and self.peers.is_slow(rank)
        packed = pack(data) if may else None
        if packed is not None:
            return self.peers.send(rank, number, packed, sign)
        return self.peers.send(rank, number, data, sign & ~PACKED)

    def _gather(self, tag: _Tag, whole: Sequence[Tensor], own: Tensor) -> Turns:
        """Everybody's tensor to everybody; `whole` are flat, on the host."""
        whole[self._own].copy_(own)
        data = _bytes(own)
        yield from self._exchange(tag, [data] * len(self._ranks), [_bytes(tensor) for tensor in whole])

    def _reduce_piece(self, tag: _Tag, pieces: Sequence[Tensor], out: Tensor, op: Any) -> Turns:
        """The sum of everybody's piece for this rank, in the order of ranks."""
        own = pieces[self._own]
        parts = [own if peer == self._own else torch.empty_like(own) for peer in range(len(pieces))]
        yield from self._exchange(tag, [_bytes(piece) for piece in pieces], [_bytes(part) for part in parts])
        out.copy_(_reduced(parts, op))

    def _all_reduce(self, tag: _Tag, flat: Tensor, op: Any) -> Turns:
        size = len(self._ranks)
        if size == 2:  # in one exchange as much is sent as in two
            own, other = flat, torch.empty_like(flat)
            yield from self._exchange(tag, [_bytes(own)] * size, [_bytes(other)] * size)
            first, second = (own, other) if self._own == 0 else (other, own)
            _combine_by(op)(first, second, out=flat)
            if op == dist.ReduceOp.AVG:
                flat.div_(size)
            return
        if flat.numel() * flat.element_size() <= SMALL_BYTES or flat.numel() < size:
            parts = [torch.empty_like(flat) for _ in self._ranks]
            yield from self._gather(tag, parts, flat)
            flat.copy_(_reduced(parts, op))
            return
        pieces = flat.tensor_split(size)
        yield from self._reduce_piece(tag, pieces, pieces[self._own], op)
        yield from self._gather(tag, pieces, pieces[self._own])

    def _once(
        self, tag: _Tag, sent: Sequence[memoryview | None], rooms: Sequence[memoryview | None]
    ) -> Turns:
        yield from self._exchange(tag, sent, rooms)

    # What follows overrides torch's names.
    def allreduce(self, tensors: Any, opts: Any = None) -> _Work:  # type: ignore[override]
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        flat = _flat(tensor)
        return self._start(
            "all_reduce", flat.dtype, lambda tag: self._all_reduce(tag, flat, op), _back([tensor], [flat]), op
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        (outs,), (own,) = outputs, inputs
        rooms, flat = [_flat(out, read=False) for out in outs], _flat(own)
        return self._start(
            "all_gather", flat.dtype, lambda tag: self._gather(tag, rooms, flat), _back(outs, rooms)
        )

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        room, flat = _flat(output, read=False), _flat(own)
        pieces = room.view(len(self._ranks), -1)
        return self._start(
            "all_gather",
            flat.dtype,
            lambda tag: self._gather(tag, list(pieces), flat),
            _back([output], [room]),
        )

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> _Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        room, flat = _flat(output, read=False), _flat(whole)
        pieces = list(flat.view(len(self._ranks), -1))
        return self._start(
            "reduce_scatter",
            flat.dtype,
            lambda tag: self._reduce_piece(tag, pieces, room, op),
            _back([output], [room]),
            op,
        )

    # As torch has called them since 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def broadcast(self, tensors: Any, opts: Any = None) -> _Work:  # type: ignore[override]
        (tensor,) = tensors
        root = opts.rootRank if opts is not None else 0
        flat, size = _flat(tensor), len(self._ranks)
        rooms: list[memoryview | None] = [None] * size
        sent: list[memoryview | None] = [None] * size
        if self._own == root:
            sent = [_bytes(flat)] * size
        else:
            rooms[root] = _bytes(flat)
        return self._start(
            "broadcast", flat.dtype, lambda tag: self._once(tag, sent, rooms), _back([tensor], [flat])
        )

    def barrier(self, opts: Any = None) -> _Work:
        nothing = [memoryview(bytearray())] * len(self._ranks)  # an early message is copied into it
        return self._start("barrier", torch.uint8, lambda tag: self._once(tag, nothing, nothing))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:
        (tensor,) = tensors
        flat = _flat(tensor)
        done = self.peers.send(self._ranks[to], self._space | _DIRECT | tag, _bytes(flat), _message(flat))
        what = f"a message to rank {self._ranks[to]}"
        return _Work(done, lambda: None, what, self._timeout_s, self._meeting)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Work:
        (tensor,) = tensors
        flat = _flat(tensor, read=False)
        done = self.peers.receive(
            self._ranks[source], self._space | _DIRECT | tag, _bytes(flat), _message(flat)
        )
        what = f"a message from rank {self._ranks[source]}"
        return _Work(done, _back([tensor], [flat]), what, self._timeout_s, self._meeting)


def create_group(options: Any, unused: Any) -> PlaitGroup:
    """Make a group as torch asks for it; the sockets are those of the run's store."""
    store = options.store
    while not isinstance(store, RunStore):
        store = store.underlying_store
    ranks = options.global_ranks_in_group or range(options.group_size)
    name = f"group {options.group_id}"
    timeout_s = options.timeout.total_seconds()
    return PlaitGroup(store.peers(), name, options.group_rank, list(ranks), timeout_s, store.meeting)


def register() -> None:
    """Make the backend known to torch in this process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu", "cuda"])


def _flat(tensor: Tensor, *, read: bool = True) -> Tensor:
    """The elements in order, on the host: the tensor's own memory where it can be."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor.detach().view(-1)
    if read:
        return tensor.detach().cpu().contiguous().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype)


def _back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> Callable[[], None]:
    """Copies results to where they were asked for, unless they are there."""

    def finish() -> None:
        with torch.no_grad():
            for tensor, flat in zip(tensors, flats, strict=True):
                if tensor.data_ptr() != flat.data_ptr():
                    tensor.copy_(flat.view(tensor.shape))

    return finish


def _message(flat: Tensor) -> int:
    return signature("message", flat.dtype)


def _bytes(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())


def _combine_by(op: Any) -> Callable[..., Tensor]:
    combine = next((join for known, join, _ in _COMBINE if op == known), None)
    if combine is None:
        raise PlanError(
            f"ranks cannot be combined by {op} on processors.", fix="use a sum, mean, product, min or max."
        )
    return combine


def _reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    """All parts as one, the first rank's first."""
    combine, found = _combine_by(op), parts[0].clone()
    for part in parts[1:]:
        combine(found, part, out=found)
    return found / len(parts) if op == dist.ReduceOp.AVG else found
