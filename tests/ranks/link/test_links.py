"""Every collective, through every kind of link, along one axis and along several: against plain torch."""

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective
from plait.run.interpret.serial import Mailboxes, SerialLinks
from plait.run.link.between import links_between
from plait.run.link.links import Handle, Links, NoLinks
from plait.run.link.process_links import ProcessLinks
from plait.run.link.shared_links import SharedLinks
from plait.run.start.launch import Seat, connect, disconnect, launch

pytestmark = pytest.mark.timeout(90)
CPU = torch.device("cpu")
MESHES = {
    "data=3": Mesh(axes=(("data", 3),)),
    "data=2,tensor=2": Mesh(axes=(("data", 2), ("tensor", 2))),
    "data=2,domain=1,tensor=2": Mesh(axes=(("data", 2), ("domain", 1), ("tensor", 2))),
}


def collective(op: Any, **fields: Any) -> Collective:
    return Collective(id=0, name=op, kind="communication", op=op, axis="data", **fields)


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Whole numbers, so that no order of summation matters."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, shape, generator=generator).to(dtype)


Case = tuple[Collective, list[Tensor], list[Tensor]]
"""A collective, what each rank of a group gives, and what each gets."""


def cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    """For one group; its ranks give numbers of their own."""
    for shape in ((6,), (5, 4, 3), (40, 50, 3)):
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            given = [value(rank, shape, dtype) for rank in ranks]
            total = torch.stack(given).sum(0).to(dtype)
            yield collective("all_reduce"), given, [total] * len(ranks)
    yield from _pieces(ranks)
    yield from _halos(ranks)


def _pieces(ranks: tuple[int, ...]) -> Iterator[Case]:
    for unequal in (False, True):
        extents = tuple(3 * index if unequal else 4 for index in range(len(ranks)))
        for dim in (0, 1, 2):
            shape = [5, 6, 7]
            shape[dim] = sum(extents)
            given = [value(rank, tuple(shape)) for rank in ranks]
            pieces = list(given[0].split(extents, dim))
            gather = collective("all_gather", dim=dim, extents=extents)
            yield gather, pieces, [given[0]] * len(ranks)
            mask = given[0] > 0
            yield gather, list(mask.split(extents, dim)), [mask] * len(ranks)
            scatter = replace(gather, op="reduce_scatter", name="reduce_scatter")
            yield scatter, given, list(torch.stack(given).sum(0).split(extents, dim))


def _halos(ranks: tuple[int, ...]) -> Iterator[Case]:
    count = len(ranks)
    for before, after in ((1, 2), (2, 0), (0, 1)):
        for dim in (0, 1, 2):
            shape = [4, 4, 4]
            shape[dim] *= count
            whole = value(9, tuple(shape))
            edge = [*whole.shape]
            edge[dim] = before
            last = [*whole.shape]
            last[dim] = after
            padded = torch.cat([torch.full(edge, -7.0), whole, torch.full(last, -7.0)], dim)
            wide = [padded.narrow(dim, 4 * i, 4 + before + after).contiguous() for i in range(count)]
            fields = {"dim": dim, "before": before, "after": after}
            yield collective("halo", fill=-7.0, **fields), list(whole.split(4, dim)), wide
            total = torch.zeros_like(padded)
            for index, piece in enumerate(wide):
                total.narrow(dim, 4 * index, 4 + before + after).add_(piece)
            inner = total.narrow(dim, before, 4 * count)
            yield collective("halo_add", **fields), wide, list(inner.split(4, dim))


def groups(mesh: Mesh) -> list[str]:
    names = [name for name, _ in mesh.axes]
    return [*names, "+".join(names), "+".join(reversed(names))]


def started(links: Links, mesh: Mesh, rank: int) -> list[tuple[Handle, Tensor, str]]:
    """All cases along all groups of a mesh at once, with what is expected and a name."""
    found = []
    for axis in groups(mesh):
        ranks = mesh.group(rank, axis)
        for case, given, expected in cases(ranks):
            own = ranks.index(rank)
            handle = links.start(replace(case, axis=axis), given[own].clone())
            found.append((handle, expected[own], f"{case.op} {axis} dim {case.dim} {case.extents}"))
    return found


def wrong(pending: list[tuple[Handle, Tensor, str]]) -> list[str]:
    names = []
    for handle, expected, name in pending:
        result = handle.result()
        if result.dtype != expected.dtype or not torch.equal(result, expected):
            names.append(name)
    return names


@pytest.mark.parametrize("mesh", MESHES.values(), ids=str)
def test_mailboxes(mesh: Mesh) -> None:
    boxes = Mailboxes(mesh)
    pending = [started(SerialLinks(boxes, rank), mesh, rank) for rank in range(mesh.size)]
    assert all(handle.ready() for handles in pending for handle, _, _ in handles)
    assert [wrong(handles) for handles in pending] == [[]] * mesh.size


@pytest.mark.parametrize("share", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize("mesh", MESHES.values(), ids=str)
def test_processes(mesh: Mesh, share: bool) -> None:
    def main(seat: Seat) -> list[str]:
        connect(seat, timeout_s=30)
        links = links_between(mesh, seat.rank, CPU, timeout_s=20, share=share)
        assert isinstance(links, SharedLinks if share else ProcessLinks)
        found = wrong(started(links, mesh, seat.rank))
        disconnect()
        return found

    assert launch(main, ranks=mesh.size) == [[]] * mesh.size


def flat_exchange(links: Links, rank: int, ranks: int) -> Generator[Handle, None, list[bool]]:
    """A bucket's life under zero: gathered in place from its chunks, summed in place into them. Yields to wait."""
    chunk = 30_001
    gather = collective("all_gather", extents=(chunk,) * ranks)
    scatter = collective("reduce_scatter", extents=(chunk,) * ranks)
    right = []
    for own_memory in (True, False):
        bucket = links.buffer(chunk * ranks, torch.float32, CPU, "data") if own_memory else None
        bucket = bucket if bucket is not None else torch.zeros(chunk * ranks)
        shard = links.buffer(chunk, torch.float32, CPU, "data")
        for step in range(4):
            bucket[chunk * rank : chunk * (rank + 1)] = float(10 * step + rank)
            handle = links.start(gather, bucket[chunk * rank : chunk * (rank + 1)], bucket)
            yield handle
            result = handle.result()
            whole = torch.arange(ranks).repeat_interleave(chunk) + 10.0 * step
            right.append(result.data_ptr() == bucket.data_ptr() and torch.equal(bucket, whole))
            shard.fill_(float(step + rank))
            handle = links.start(gather, shard, torch.empty(chunk * ranks))
            yield handle
            right.append(torch.equal(handle.result(), whole - 9.0 * step))
            total = collective("all_reduce")
            handle = links.start(total, torch.zeros(1))  # all have read each other's chunks
            yield handle
            handle.result()
            bucket.copy_(whole * (rank + 1))
            handle = links.start(scatter, bucket)
            yield handle
            result = handle.result()
            bucket_of_next_step = torch.full_like(bucket, -1.0)
            expected = float(rank + 10 * step) * sum(range(1, ranks + 1))
            right.append(bool((result == expected).all()) and result.shape == (chunk,))
            bucket.copy_(bucket_of_next_step)  # a rank may write to it once it has its own result
    return right


@pytest.mark.parametrize("share", [True, False], ids=["shared", "sockets"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_flat_buckets_in_place_between_processes(ranks: int, share: bool) -> None:
    def main(seat: Seat) -> list[bool]:
        connect(seat, timeout_s=30)
        mesh = Mesh(axes=(("data", ranks),))
        links = links_between(mesh, seat.rank, CPU, timeout_s=20, share=share)
        turns = flat_exchange(links, seat.rank, ranks)
        while True:
            try:
                next(turns)
            except StopIteration as stop:
                disconnect()
                return list(stop.value)

    assert launch(main, ranks=ranks) == [[True] * 24] * ranks


def test_flat_buckets_in_mailboxes() -> None:
    boxes = Mailboxes(Mesh(axes=(("data", 3),)))
    running = {rank: flat_exchange(SerialLinks(boxes, rank), rank, 3) for rank in range(3)}
    found: dict[int, list[bool]] = {}
    while running:
        for rank, turns in list(running.items()):
            try:
                next(turns)
            except StopIteration as stop:
                found[rank] = list(stop.value)
                del running[rank]
    assert list(found.values()) == [[True] * 24] * 3


def test_sums_of_pieces_are_made_in_the_order_of_ranks_bit_for_bit() -> None:
    def main(seat: Seat) -> list[bool]:
        connect(seat, timeout_s=30)
        links = links_between(Mesh(axes=(("data", 4),)), seat.rank, CPU, timeout_s=20)
        found = []
        for chunk in (1, 100, 100_003):
            given = [torch.randn(4 * chunk, generator=torch.Generator().manual_seed(r)) for r in range(4)]
            total = ((given[0] + given[1]) + given[2]) + given[3]
            buffer = links.buffer(4 * chunk, torch.float32, CPU, "data")
            buffer.copy_(given[seat.rank])
            scatter = collective("reduce_scatter", extents=(chunk,) * 4)
            both = [links.start(scatter, buffer), links.start(scatter, given[seat.rank])]
            in_place, fresh = (handle.result() for handle in both)
            found += [torch.equal(in_place, total.split(chunk)[seat.rank]), torch.equal(fresh, in_place)]
            found.append(in_place.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr())
        disconnect()
        return found

    assert launch(main, ranks=4) == [[True] * 9] * 4


def test_a_rank_that_is_alone_has_its_own_result() -> None:
    mesh = Mesh(axes=(("data", 1),))
    for case, given, expected in cases((0,)):
        assert torch.equal(NoLinks().start(case, given[0].clone()).result(), expected[0]), case
    out = torch.empty(4)
    gather = collective("all_gather", extents=(4,))
    assert NoLinks().start(gather, torch.arange(4.0), out).result() is out
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert isinstance(links_between(mesh, 0, CPU, timeout_s=1), NoLinks)
