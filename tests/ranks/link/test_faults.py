"""A rank that dies, stays away or does something else, under each of our own links: everybody is told, and soon."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.options import Emulation
from plait.plan.named import resolve
from plait.program.instructions import Collective
from plait.run.link.between import links_of_plan
from plait.run.link.links import Links
from plait.run.link.shm.memory import has_ended
from plait.run.start.launch import Losses, Seat, connect, launch
from plait.run.wire.emulate import Wire

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
EMULATED = Emulation.parse("bandwidth=1Gbit,latency=100us,hosts=2x2")
SETTINGS: dict[str, dict[str, Any]] = {
    "shared": {},
    "sockets": {"transport": "sockets"},
    "ring": {"algorithm": "ring", "groups": 2},
    "ring over sockets": {"algorithm": "ring", "transport": "sockets"},
    "hosts": {},
}
"""Ways to reach others; `hosts` on two of two ranks."""


def _all_reduce() -> Collective:
    return Collective(id=0, name="all_reduce", kind="communication", op="all_reduce", axis="data")


def _links(seat: Seat, way: str, timeout_s: float = 40) -> Links:
    emulation = EMULATED if way == "hosts" else None
    if emulation is not None:
        os.environ["PLAIT_HOST"] = f"host {emulation.host_of(seat.rank)}"
    connect(seat, timeout_s=timeout_s)
    if emulation is not None:
        seat.store.peers().emulate(Wire.between(emulation, seat.rank))
    plan = resolve("ddp", seat.ranks, {"links": SETTINGS[way]})
    return links_of_plan(plan, seat.rank, CPU, timeout_s=timeout_s, emulation=emulation)


def _shared_files() -> list[int]:
    """Of all processes: the memory that links share, by number."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if "plait-gradients" in os.readlink(entry):
                found.append(os.stat(entry).st_ino)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("way", SETTINGS)
def test_a_rank_that_is_killed_in_a_collective_is_told_by_everybody(way: str, tmp_path: Path) -> None:
    def die() -> None:
        (tmp_path / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def main(seat: Seat) -> list[Any]:
        links = _links(seat, way)
        own = [os.stat(f"/proc/self/fd/{entry}").st_ino for entry in _own_files()]
        tensor = links.buffer(50_000, torch.float32, CPU, "data")
        links.start(_all_reduce(), tensor).result()
        seat.board.enter(0, 0, "begun")
        if seat.rank == 3:
            threading.Timer(0.3, die).start()
        try:
            while True:
                links.start(_all_reduce(), tensor).result()
        except ConnectionError as error:
            return [time.monotonic(), str(error), own]

    found = launch(main, ranks=4, losses=Losses(dispensable=range(4)))[:3]
    died = float((tmp_path / "died").read_text())
    assert all(at - died < 5 for at, _, _ in found), found
    # Who hears it from a rank that has given up names that one: somebody names the dead.
    assert any("rank 3" in text for _, text, _ in found), found
    assert all("rank" in text for _, text, _ in found), found
    assert not {number for _, _, own in found for number in own} & set(_shared_files())


def _own_files() -> list[str]:
    return [e for e in os.listdir("/proc/self/fd") if "plait-gradients" in _target(e)]


def _target(entry: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{entry}")
    except OSError:
        return ""


@pytest.mark.parametrize("way", SETTINGS)
def test_a_wait_for_too_long_names_operation_and_rank(way: str) -> None:
    ranks = 4 if way == "hosts" else 2

    def main(seat: Seat) -> str:
        links = _links(seat, way, timeout_s=1)
        if seat.rank == ranks - 1:
            time.sleep(4)
            return ""
        try:
            links.start(_all_reduce(), torch.ones(50_000)).result()
        except ConnectionError as error:
            return str(error)
        return "nothing"

    told = launch(main, ranks=ranks, losses=Losses(dispensable=range(ranks)))
    assert any(f"rank {ranks - 1}" in text for text in told[:-1]), told
    for text in told[:-1]:  # on several hosts, of the level at which it waits
        assert "timed out" in text and any(op in text for op in ("all_reduce", "reduce_scatter")), told


@pytest.mark.parametrize("what", ["sizes", "dtypes", "operations", "kinds"])
def test_ranks_that_differ_are_told_over_sockets(what: str) -> None:
    def main(seat: Seat) -> str:
        connect(seat, timeout_s=20)
        other = bool(seat.rank)
        tensor = torch.ones(8 + (other and what == "sizes"), dtype=torch.float32)
        if what == "dtypes" and other:
            tensor = tensor.to(torch.int32)
        try:
            if what == "kinds" and other:
                dist.all_gather([torch.ones(8), torch.ones(8)], tensor)
            else:
                dist.all_reduce(
                    tensor, dist.ReduceOp.MAX if what == "operations" and other else dist.ReduceOp.SUM
                )
        except Exception as error:
            return str(error)
        return "nothing"

    for rank, text in enumerate(launch(main, ranks=2, losses=Losses(dispensable=range(2)))):
        assert f"rank {1 - rank} sent" in text and "the ranks do not do the same" in text
        wanted = {"sizes": "36 bytes", "dtypes": "torch.int32", "operations": "max", "kinds": "all_gather"}
        assert wanted[what] in text and "all_reduce (sum, torch.float32) of 32 bytes" in text


MPI_MAIN = """
import os, signal, sys, threading, time
import torch
from pathlib import Path
from tests.ranks.link.test_faults import mpi_task
mpi_task(Path(sys.argv[1]), sys.argv[2])
"""


def mpi_task(folder: Path, fault: str) -> None:
    """What each task of mpirun does: sums without end, until the last one dies, or stays away."""
    from mpi4py import MPI

    from plait.plan.mesh import Mesh
    from plait.run.link.mpi_links import MpiLinks

    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    dead, gone = folder / "died", dict[int, Exception]()
    links = MpiLinks(Mesh(axes=(("data", ranks),)), rank, 2.0, gone.get)
    links.start(_all_reduce(), torch.ones(5)).result()
    (folder / f"{rank}").write_text(str(os.getpid()))
    if rank == ranks - 1:
        dead.write_text(str(time.monotonic()))
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)
        os._exit(0)
    for _ in range(2):
        try:
            links.start(_all_reduce(), torch.ones(5)).result()
        except ConnectionError as error:
            print(f"rank {rank}: {error}", flush=True)
        gone[ranks - 1] = ConnectionError(f"the connection to rank {ranks - 1} is lost.")
    os._exit(0)


@pytest.mark.parametrize("fault", ["killed", "stays away"])
def test_through_mpi(fault: str, tmp_path: Path) -> None:
    """A task that is killed ends all of them; one that does not come is told with the operation and who is missing."""
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    pytest.importorskip("mpi4py", reason="needs mpi4py: pip install plait[mpi]")
    root = Path(__file__).parents[3]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-c", MPI_MAIN]
    ended = subprocess.run(
        [*command, str(tmp_path), fault], cwd=root, capture_output=True, text=True, timeout=50, check=False
    )
    if fault == "killed":
        assert time.monotonic() - float((tmp_path / "died").read_text()) < 10
        assert ended.returncode and "rank 2" in ended.stderr + ended.stdout
        pids = [int((tmp_path / str(rank)).read_text()) for rank in range(3)]
        until = time.monotonic() + 10
        while not all(has_ended(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(has_ended(pid) for pid in pids)
        return
    for rank in range(2):
        late, lost = (text for text in ended.stdout.splitlines() if text.startswith(f"rank {rank}:"))
        assert f"all_reduce of 20 bytes with rank {1 - rank}, 2 did not end within 2 s: timed out" in late
        assert "all_reduce of 20 bytes: the connection to rank 2 is lost" in lost
