"""Collectives over slow wires: fewer bytes, the same bits; and what a socket is known to take."""

import socket
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import RunError
from plait.run import native
from plait.run.wire.group import PlaitGroup
from plait.run.wire.peers import Peers
from plait.run.wire.rate import bytes_per_s
from plait.run.wire.signature import PACKED, signature
from plait.run.wire.store import RunStore

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(
        not hasattr(native.compiled(), "plait_pack"), reason="no compiled core: install gcc, then plait"
    ),
]
_COUNT = 40_000


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes of the messages of all ranks, and what they belong to."""
    found: list[tuple[int, int]] = []
    send = Peers.send

    def noted(self: Peers, to: int, tag: int, data: memoryview, sign: int = 0) -> Any:
        found.append((len(data), sign))
        return send(self, to, tag, data, sign)

    monkeypatch.setattr(Peers, "send", noted)
    return found


@pytest.fixture(params=[2, 3])
def groups(request: pytest.FixtureRequest, stores: list[RunStore]) -> Iterator[list[PlaitGroup]]:
    """A group of some of the ranks."""
    ranks = range(request.param)
    made = [
        PlaitGroup(stores[rank].peers(), "of a test", rank, ranks, 10, stores[rank].meeting) for rank in ranks
    ]
    yield made
    for group in made:
        group.close()
    for rank in ranks:
        stores[rank].peers().close()


def _all_reduce(groups: list[PlaitGroup], parts: list[Tensor]) -> list[Tensor]:
    own = [part.clone() for part in parts]
    for work in [group.allreduce([part]) for group, part in zip(groups, own, strict=True)]:
        work.wait()
    return own


def _all_gather(groups: list[PlaitGroup], parts: list[Tensor]) -> list[Tensor]:
    outs = [part.new_empty(len(groups) * part.numel()) for part in parts]
    works = [g._allgather_base(out, part) for g, out, part in zip(groups, outs, parts, strict=True)]
    for work in works:
        work.wait()
    return outs


def _reduce_scatter(groups: list[PlaitGroup], parts: list[Tensor]) -> list[Tensor]:
    outs = [part.new_empty(part.numel() // len(groups)) for part in parts]
    works = [g._reduce_scatter_base(out, part) for g, out, part in zip(groups, outs, parts, strict=True)]
    for work in works:
        work.wait()
    return outs


@pytest.mark.parametrize("collective", [_all_reduce, _all_gather, _reduce_scatter])
def test_a_slow_wire_has_fewer_bytes_and_results_have_the_same_bits(
    groups: list[PlaitGroup],
    sent: list[tuple[int, int]],
    collective: Callable[[list[PlaitGroup], list[Tensor]], list[Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seed = torch.Generator().manual_seed(0)
    parts = [torch.randn(6 * _COUNT, generator=seed) for _ in groups]
    expected = collective(groups, parts)
    as_they_are = sum(size for size, _ in sent)
    assert not any(sign & PACKED for _, sign in sent), "no socket of this host is slow"
    sent.clear()
    monkeypatch.setattr(Peers, "is_slow", lambda peers, rank: True)
    found = collective(groups, parts)
    assert sum(size for size, _ in sent) < 0.86 * as_they_are
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_cannot_be_packed_goes_as_it_is(
    groups: list[PlaitGroup], sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Peers, "is_slow", lambda peers, rank: True)
    seed = torch.Generator().manual_seed(0)
    far = [torch.exp(30 * torch.randn(_COUNT, generator=seed)) for _ in groups]
    for parts in (far, [part.double() for part in far], [part[:100] for part in far]):
        found = _all_reduce(groups, parts)
        assert all(torch.equal(own, found[0]) for own in found)
        assert torch.equal(found[0], reduce(torch.add, parts))
    assert not any(sign & PACKED for _, sign in sent)


@pytest.mark.parametrize("asked_first", [True, False])
@pytest.mark.parametrize(
    ("num_bytes", "may_be_packed"),
    [(9, True), (8, True), (4, False)],
    ids=["long", "as long", "not asked for"],
)
def test_packed_bytes_come_only_where_they_may(
    stores: list[RunStore], asked_first: bool, num_bytes: int, may_be_packed: bool
) -> None:
    first, second = stores[0].peers(), stores[1].peers()
    sign = signature("all_reduce", torch.float32, "sum")
    room = bytearray(8)

    def ask() -> Any:
        return second.receive(0, 1, memoryview(room), sign | PACKED if may_be_packed else sign)

    done = ask() if asked_first else None
    first.send(1, 1, memoryview(b"1" * num_bytes), sign | PACKED).result(10)
    done = done or ask()
    with pytest.raises(
        RunError, match=rf"rank 0 sent all_reduce \(sum, torch.float32\) of {num_bytes} bytes"
    ):
        done.result(10)
    assert room == bytes(8)
    for peers in (first, second):
        peers.close()


def test_a_socket_that_never_had_to_wait_has_no_rate() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert bytes_per_s(near) is None
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as made:
        assert bytes_per_s(made) is None


def test_a_wire_that_is_emulated_is_as_slow_as_it_is_said_to_be(stores: list[RunStore]) -> None:
    class Emulated:
        def __init__(self, bandwidth: float) -> None:
            self.bandwidth = bandwidth

        def is_crossed(self, to: int) -> bool:
            return to == 1

    peers = stores[0].peers()
    peers.emulate(Emulated(1e8))  # type: ignore[arg-type]
    assert peers.is_slow(1) and not peers.is_slow(2)
    peers.emulate(Emulated(1e10))  # type: ignore[arg-type]
    assert not peers.is_slow(1)
    peers.close()
