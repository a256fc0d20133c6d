"""The backend plait_shm under torch's own programs, between real processes: results of gloo, faults that are told."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.mixed_collectives import differences
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait.shm
from plait.run.start.launch import Seat, launch

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")]


def begin(seat: Seat, folder: Path, backend: str = plait.shm.BACKEND, timeout_s: float = 20) -> None:
    store = dist.FileStore(str(folder / "store"), seat.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=timedelta(seconds=timeout_s)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_mixed_collectives_equal_gloos(ranks: int, either_core: str, tmp_path: Path) -> None:
    def main(seat: Seat) -> list[str]:
        begin(seat, tmp_path, "gloo")
        groups = [list(range(ranks)), [0, 1], [1, 2, 3]][: 2 if ranks == 2 else 3]
        gloo = [(group, dist.new_group(group)) for group in groups]
        shm = [dist.new_group(group, backend=plait.shm.BACKEND) for group in groups]
        wrong = differences(gloo, shm, seat.rank, seed=7, count=150)
        dist.barrier()
        dist.destroy_process_group()
        return wrong

    assert launch(main, ranks=ranks) == [[]] * ranks


def _trained(wrap: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(data).square().mean().backward()
        optimizer.step()
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in wrapped.parameters()]
    return [parameter.detach().clone() for parameter in full]


def test_ddp_and_fsdp2_train_as_on_gloo(tmp_path: Path) -> None:
    def main(seat: Seat) -> list[bool]:
        found = {}
        for backend in ("gloo", plait.shm.BACKEND):
            (tmp_path / backend).mkdir(exist_ok=True)
            begin(seat, tmp_path / backend, backend)
            found[backend, "ddp"] = _trained(DistributedDataParallel)
            found[backend, "fsdp"] = _trained(fully_shard)
            said: list[Any] = [None] * seat.ranks
            dist.all_gather_object(said, {"rank": seat.rank})
            assert said == [{"rank": rank} for rank in range(seat.ranks)]
            dist.destroy_process_group()
        shm = plait.shm.BACKEND
        pairs = [
            (one, other)
            for how in ("ddp", "fsdp")
            for one, other in zip(found["gloo", how], found[shm, how], strict=True)
        ]  # gloo adds up in another order: equal up to the rounding of float32
        return [torch.allclose(one, other, rtol=1e-6, atol=1e-7) for one, other in pairs]

    assert launch(main, ranks=2) == [[True] * 8] * 2


def test_tensors_in_shared_memory_are_summed_where_they_lie(either_core: str, tmp_path: Path) -> None:
    def main(seat: Seat) -> list[bool]:
        begin(seat, tmp_path)
        right = []
        for count in (3, 70_001, 400_001):
            tensor = plait.shm.empty((count,), torch.float64)
            torch.arange(count, out=tensor)
            mixed = plait.shm.empty((count,)) if seat.rank else torch.empty(count)
            mixed.fill_(seat.rank + 1)
            work = dist.all_reduce(tensor, async_op=True)
            dist.all_reduce(mixed)  # in shared memory on one rank alone
            work.wait()
            right += [torch.equal(tensor, 3.0 * torch.arange(count)), bool((mixed == 6).all())]
        dist.destroy_process_group()
        return right

    assert launch(main, ranks=3) == [[True] * 6] * 3


def test_work_goes_on_in_the_background(tmp_path: Path) -> None:
    def main(seat: Seat) -> bool:
        begin(seat, tmp_path)
        tensor = torch.full((1 << 20,), float(seat.rank + 1))
        told: list[float] = []
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().then(lambda future: told.append(float(future.value()[0][0])))
        deadline = time.monotonic() + 30
        while not told and time.monotonic() < deadline:  # nobody waits for the work
            time.sleep(0.002)
        assert work.is_completed()
        dist.destroy_process_group()
        return told == [3.0]

    assert launch(main, ranks=2) == [True] * 2


@pytest.mark.parametrize("what", ["sizes", "dtypes", "operations", "kinds"])
def test_ranks_that_differ_are_told(what: str, tmp_path: Path) -> None:
    def main(seat: Seat) -> str:
        begin(seat, tmp_path)
        other = bool(seat.rank)
        tensor = torch.ones(8 + (other and what == "sizes"))
        if what == "dtypes":
            tensor = tensor.to(torch.int32 if other else torch.float32)
        try:
            if what == "kinds" and other:
                dist.broadcast(tensor, 0)
            elif what == "operations" and other:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
            else:
                dist.all_reduce(tensor)
        except Exception as error:
            return str(error)
        return "nothing"

    told = launch(main, ranks=2)
    assert all(
        "the ranks do not do the same" in text and "rank 0" in text and "rank 1" in text for text in told
    )
    wanted = {"sizes": "36 bytes", "dtypes": "torch.int32", "operations": "max", "kinds": "broadcast"}[what]
    assert wanted in told[0] and "32 bytes" in told[0]


@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_rank_that_dies_is_told_within_seconds(size: int, tmp_path: Path) -> None:
    def main(seat: Seat) -> tuple[float, str]:
        begin(seat, tmp_path, timeout_s=60)
        dist.barrier()
        if seat.rank == 2:
            return 0.0, ""  # its process ends
        began = time.monotonic()
        try:
            dist.all_reduce(torch.ones(size))
        except ConnectionError as error:
            return time.monotonic() - began, str(error)
        return 99.0, "nothing"

    (first, said), (second, also), _ = launch(main, ranks=3)
    assert max(first, second) < 5 and "rank 2" in said and "all_reduce" in said and "is gone" in also
