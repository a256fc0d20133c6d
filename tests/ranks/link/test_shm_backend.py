"""The backend plait_shm under torch's own programs, between real processes: results of gloo, faults that are told."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.link.mixed_collectives import differences
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait.shm
from plait.run.start.launch import Losses, Seat, launch

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


def test_ranks_of_several_hosts_equal_gloo(tmp_path: Path) -> None:
    """Four ranks as two hosts of two, every other rank on one; all kinds of collectives, in sub-groups too."""

    def main(seat: Seat) -> tuple[list[str], list[str]]:
        os.environ["PLAIT_HOST"] = f"host {seat.rank % 2}"
        begin(seat, tmp_path, "gloo")
        groups = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]
        gloo = [(group, dist.new_group(group)) for group in groups]
        shm = [dist.new_group(group, backend=plait.shm.BACKEND) for group in groups]
        wrong = differences(gloo, shm, seat.rank, seed=3, count=100)
        wrong += (
            [] if torch.equal(_summed_int16(shm[0]), torch.full((5,), 4, dtype=torch.int16)) else ["int16"]
        )
        told = []
        for tensor in (torch.ones(9 if seat.rank == 3 else 8), torch.ones(8)):
            try:
                dist.all_reduce(tensor, group=shm[0])
            except Exception as error:
                told.append(str(error))
        dist.barrier()
        dist.destroy_process_group()
        return wrong, told

    for wrong, told in launch(main, ranks=4):
        assert wrong == [] and len(told) == 2, told
        assert "36 bytes" in told[0] and "32 bytes" in told[0] and "rank 3" in told[0]


def _summed_int16(group: Any) -> torch.Tensor:
    tensor = torch.ones(5, dtype=torch.int16)
    dist.all_reduce(tensor, group=group)
    return tensor


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


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("size", [8, 1 << 20])
def test_a_rank_that_is_killed_in_a_collective_is_told_and_leaves_nothing(
    size: int, hosts: int, tmp_path: Path
) -> None:
    def main(seat: Seat) -> list[Any]:
        os.environ["PLAIT_HOST"] = f"host {seat.rank % hosts}"
        begin(seat, tmp_path, timeout_s=60)
        files = [os.stat(entry).st_ino for entry in Path("/proc/self/fd").iterdir() if _is_shared(entry)]
        seat.board.enter(0, 0, "begun")
        if seat.rank == 2:
            threading.Timer(0.3, _die, [tmp_path / "died"]).start()
        try:
            while True:
                dist.all_reduce(torch.ones(size))
        except Exception as error:  # gloo's are of other kinds than ours
            return [time.monotonic(), str(error), files]

    found = launch(main, ranks=3, losses=Losses(dispensable=range(3)))[
        :2
    ]  # the launcher leaves those that live in peace
    died = float((tmp_path / "died").read_text())
    assert all(at - died < 5 for at, _, _ in found), found
    if hosts == 1:
        assert all("rank 2" in text and "all_reduce" in text for _, text, _ in found), found
    left = {os.stat(entry).st_ino for entry in Path("/proc").glob("[0-9]*/fd/*") if _is_shared(entry)}
    assert found[0][2] and not left & {*found[0][2], *found[1][2]}


def _die(note: Path) -> None:
    note.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def _is_shared(entry: Path) -> bool:
    try:
        return "plait-gradients" in os.readlink(entry) and os.path.exists(entry)
    except OSError:
        return False


def test_a_wait_for_too_long_names_operation_and_rank(tmp_path: Path) -> None:
    def main(seat: Seat) -> list[str]:
        begin(seat, tmp_path, timeout_s=1)
        told = []
        for wait in (lambda: dist.all_reduce(torch.ones(8)), lambda: dist.recv(torch.ones(8), 1, tag=5)):
            try:
                wait() if seat.rank == 0 else None
            except ConnectionError as error:
                told.append(str(error))
        if seat.rank:
            time.sleep(4)
        return told

    first, second = launch(main, ranks=2)[0]
    assert "all_reduce" in first and "rank 1" in first and "timed out" in first
    assert "tag 5" in second and "rank 1" in second and "timed out" in second
