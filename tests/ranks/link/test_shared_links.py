"""Collectives through shared memory, between real processes: the same sums everywhere, and no wait for the dead."""

import os
import signal
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError, WorkerError
from plait.plan.mesh import Mesh
from plait.plan.named import resolve
from plait.program.instructions import Collective
from plait.run.link.between import links_between, network_here, with_lanes
from plait.run.link.process_links import ProcessLinks
from plait.run.link.shared_links import SharedLinks
from plait.run.measure.progress_times import time_progress
from plait.run.start.launch import Seat, connect, disconnect, launch

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


def _collective(op: Any = "all_reduce", **fields: Any) -> Collective:
    return Collective(id=0, name=op, kind="communication", op=op, axis="data", **fields)


def _links(seat: Seat) -> SharedLinks:
    connect(seat, timeout_s=30)
    links = links_between(Mesh(axes=(("data", seat.ranks),)), seat.rank, CPU, timeout_s=20)
    assert isinstance(links, SharedLinks)
    return links


def _value(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def _in_order(ranks: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    total = _value(0, count, dtype)
    for rank in range(1, ranks):
        total = total + _value(rank, count, dtype)
    return total


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_made_in_the_order_of_ranks_bit_for_bit(ranks: int, either_core: str) -> None:
    def main(seat: Seat) -> list[bool]:
        links = _links(seat)
        found = []
        for count in (
            1,
            2,
            5,
            1000,
            100_003,
        ):  # fewer elements than ranks; small; several parts, the last one shorter
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                own = _value(seat.rank, count, dtype)
                buffer = links.buffer(count, dtype, CPU, "data")
                buffer.copy_(own)
                pending = [links.start(_collective(), buffer), links.start(_collective(), own.clone())]
                expected = _in_order(ranks, count, dtype)
                found += [torch.equal(handle.result(), expected) for handle in pending]
        disconnect()
        return found

    assert launch(main, ranks=ranks) == [[True] * 30] * ranks


def test_a_buffer_is_summed_in_place_again_and_again(either_core: str) -> None:
    def main(seat: Seat) -> bool:
        links = _links(seat)
        buffer = links.buffer(50_000, torch.float32, CPU, "data")
        for step in range(50):
            buffer.fill_(step + seat.rank)
            result = links.start(_collective(), buffer).result()
            if result.data_ptr() != buffer.data_ptr() or not bool((result == 2 * step + 1).all()):
                return False
        return True

    assert launch(main, ranks=2) == [True, True]


@pytest.mark.parametrize("count", [1, 30_000])
def test_more_collectives_under_way_than_the_ring_holds(count: int, either_core: str) -> None:
    """A rank far ahead of another: of sums through slots, and of sums where they lie."""

    def main(seat: Seat) -> bool:
        links = _links(seat)
        buffers = [links.buffer(count, torch.float64, CPU, "data") for _ in range(200)]
        if seat.rank:
            time.sleep(0.3)
        for step, buffer in enumerate(buffers):
            buffer.fill_(step + seat.rank)
        handles = [links.start(_collective(), buffer) for buffer in buffers]
        later = links.start(_collective("all_gather", extents=(1, 1)), buffers[0][:1].clone() * 0 + seat.rank)
        right = all(bool((handle.result() == 2 * i + 1).all()) for i, handle in enumerate(handles))
        return right and later.result().tolist() == [0.0, 1.0]

    assert launch(main, ranks=2) == [True, True]


def test_pieces_in_buffers_are_gathered_and_summed_where_they_lie(either_core: str) -> None:
    extents = (40_000, 0, 30_001)

    def main(seat: Seat) -> list[bool]:
        links = _links(seat)
        whole = _value(7, sum(extents))
        out = links.buffer(sum(extents), torch.float32, CPU, "data")
        own = out.split(extents)[seat.rank]
        own.copy_(whole.split(extents)[seat.rank])
        gather = _collective("all_gather", extents=extents)
        gathered = torch.equal(links.start(gather, own, out).result(), whole)
        links.start(_collective(), torch.zeros(1)).result()  # all have read: it may be written to
        out.copy_(_value(seat.rank, sum(extents)))
        piece = links.start(_collective("reduce_scatter", extents=extents), out).result()
        wanted = _in_order(3, sum(extents)).split(extents)[seat.rank]
        return [gathered, torch.equal(piece, wanted), piece.data_ptr() == own.data_ptr()]

    found = launch(main, ranks=3)
    assert [row[:2] for row in found] == [[True, True]] * 3 and found[0][2] and found[2][2]


def test_ranks_that_differ_are_told(either_core: str) -> None:
    """A sum that is made where it lies beside one that goes through slots."""

    def main(seat: Seat) -> str:
        links = _links(seat)
        try:
            links.start(_collective(), torch.zeros(100_000 if seat.rank else 100)).result()
        except RunError as error:
            return str(error)
        return "nothing"

    for told in launch(main, ranks=2):
        assert "400 bytes" in told and "400,000 bytes" in told and "rank 0" in told and "rank 1" in told


def test_pieces_of_unequal_extent_are_joined() -> None:
    def main(seat: Seat) -> bool:
        links = _links(seat)
        extents = (3, 0, 2)
        whole = torch.arange(20.0).view(4, 5)
        own = whole.split(extents, 1)[seat.rank]
        gather = _collective("all_gather", dim=1, extents=extents)
        return all(torch.equal(links.start(gather, own).result(), whole) for _ in range(5))

    assert launch(main, ranks=3) == [True] * 3


def test_a_rank_that_waits_for_a_dead_one_ends_with_an_error() -> None:
    def main(seat: Seat) -> None:
        links = _links(seat)
        dist.barrier()
        if seat.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        links.start(_collective(), torch.zeros(3)).result()

    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1"):
        launch(main, ranks=2)
    assert time.monotonic() - start < 30


def test_a_peer_that_is_gone_is_noticed_without_a_launcher() -> None:
    def main(seat: Seat) -> str:
        links = _links(seat)
        child = os.fork()  # its death is nobody's business but the link's
        if child == 0:
            time.sleep(0.2)
            os._exit(0)
        links._axes["data"].meeting._pids = [child, child]
        try:
            links.start(_collective(), torch.zeros(3)).result() if seat.rank == 0 else time.sleep(3)
        except ConnectionError as error:
            return str(error)
        return ""

    first, second = launch(main, ranks=2)
    assert "rank 1" in first and "is gone" in first and "all_reduce" in first
    assert second == ""


def test_a_thread_does_it_where_that_was_measured_to_pay() -> None:
    def main(seat: Seat) -> list[Any]:
        links, network = _links(seat), network_here()
        plan = resolve("ddp", seat.ranks)
        memory = replace(network.inner, background=True)

        def fresh() -> SharedLinks:
            found = links_between(plan.mesh, seat.rank, CPU, timeout_s=20, fresh=True)
            assert isinstance(found, SharedLinks)
            return found

        apart = with_lanes(links, plan, seat.rank, replace(network, inner=memory), fresh)
        usual = with_lanes(
            links, plan, seat.rank, replace(network, inner=replace(memory, background=False)), fresh
        )
        tensors = [torch.full((1000,), float(at + seat.rank)) for at in range(3)]
        handles = [apart.start(_collective(), tensor) for tensor in tensors]
        sums = [handle.result()[0].item() for handle in handles]
        times = time_progress(seat.rank, seat.ranks)
        return [type(apart).__name__, usual is links, sums, sorted(times), min(times.values()) > 0]

    assert launch(main, ranks=2) == [["Lanes", True, [1.0, 3.0, 5.0], ["inline", "thread"], True]] * 2


def test_ranks_that_cannot_share_all_fall_back() -> None:
    def main(seat: Seat) -> str:
        connect(seat, timeout_s=30)
        with mock.patch("platform.machine", return_value="aarch64" if seat.rank == 1 else "x86_64"):
            links = links_between(Mesh(axes=(("data", 2),)), seat.rank, CPU, timeout_s=20)
        total = links.start(_collective(), torch.ones(2)).result()
        return f"{type(links).__name__} {total.tolist()}"

    assert launch(main, ranks=2) == [f"{ProcessLinks.__name__} [2.0, 2.0]"] * 2
