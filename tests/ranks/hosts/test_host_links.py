"""Ranks of several hosts: memory within each, sockets between, a network that is emulated; the same numbers."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from tests.ranks.link.test_links import CPU, flat_exchange, started, wrong
from torch import nn

import plait
from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.errors import UsageError
from plait.job.job import Job
from plait.options import Emulation, Trial
from plait.plan.mesh import Mesh
from plait.plan.named import resolve
from plait.program.instructions import Collective
from plait.program.value import Value
from plait.run.link import host_links
from plait.run.link.between import links_between
from plait.run.link.host_links import HostLinks, HostMesh
from plait.run.link.process_links import ProcessLinks
from plait.run.measure.predict import predict_job
from plait.run.start.launch import Seat, connect, disconnect, launch
from plait.run.wire.emulate import Wire

pytestmark = pytest.mark.timeout(90)

FAST = "bandwidth=10Gbit,latency=50us,hosts=2x2"
DATA = Mesh(axes=(("data", 4),))
BOTH = Mesh(axes=(("data", 2), ("tensor", 2)))


def test_hosts_are_boxes_of_a_mesh() -> None:
    assert [HostMesh.of(DATA, 3), HostMesh.of(BOTH, 3), HostMesh.of(DATA, 8)] == [None, None, None]
    cut = HostMesh.of(Mesh(axes=(("pipe", 2), ("data", 4), ("tensor", 2))), 4)
    assert cut is not None
    assert cut.refined.axes == (("pipe", 2), ("data", 2), ("data@host", 2), ("tensor", 2))
    assert cut.within.axes == (("data@host", 2), ("tensor", 2))
    assert cut.parts("data") == ("data", "data@host") and cut.parts("tensor+pipe") == ("pipe", "tensor")
    ranks = range(cut.mesh.size)
    assert all(
        cut.refined.group(r, cut.whole(a)) == cut.mesh.group(r, a)
        for r in ranks
        for a in ("data", "pipe+data")
    )


@pytest.mark.parametrize("is_two_level", [True, False])
@pytest.mark.parametrize("mesh", [DATA, BOTH], ids=str)
def test_every_collective_over_both_levels(
    mesh: Mesh, is_two_level: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = lambda kind, *_: is_two_level and "halo" not in kind  # noqa: E731
    monkeypatch.setattr(host_links, "is_two_level_cheaper", forced)

    def main(seat: Seat) -> tuple[list[str], list[bool], int]:
        connect(seat, timeout_s=30)
        monkeypatch.setenv("PLAIT_HOST", f"host{seat.rank // 2}")
        links = links_between(mesh, seat.rank, CPU, timeout_s=20)
        assert isinstance(links, HostLinks)
        calls = 0
        begin = host_links.TwoLevel.begin

        def counted(*given: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return begin(*given)

        monkeypatch.setattr(host_links.TwoLevel, "begin", counted)
        found, right = wrong(started(links, mesh, seat.rank)), [True]
        if mesh is DATA:
            turns = flat_exchange(links, seat.rank, 4)
            while True:
                try:
                    next(turns)
                except StopIteration as stop:
                    right = list(stop.value)
                    break
        disconnect()
        return found, right, calls

    for found, right, calls in launch(main, ranks=4):
        assert found == [] and all(right) and (calls > 0) == is_two_level


def test_buckets_are_summed_where_they_lie_and_may_be_filled_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_links, "is_two_level_cheaper", lambda *_: True)
    monkeypatch.setattr(host_links, "num_pieces", lambda _: 3)

    def main(seat: Seat) -> tuple[bool, bool]:
        connect(seat, timeout_s=30)
        monkeypatch.setenv("PLAIT_HOST", f"host{seat.rank // 2}")
        links = links_between(DATA, seat.rank, CPU, timeout_s=20)
        bucket = links.buffer(100_003, torch.float32, CPU, "data")
        sent: list[int] = []
        begin = host_links.TwoLevel._start

        def seen(two: Any, op: Any, inside: bool, tensor: torch.Tensor, *rest: Any) -> Any:
            if not inside:
                sent.append(tensor.untyped_storage().data_ptr())
            return begin(two, op, inside, tensor, *rest)

        monkeypatch.setattr(host_links.TwoLevel, "_start", seen)
        here, right = (Value.bucket(0),), True
        for round_ in range(20):
            bucket.fill_(float(seat.rank + round_))
            summed = Collective(
                name="", op="all_reduce", axis="data", reads=here, writes=here, num_bytes=bucket.nbytes
            )
            links.start(summed, bucket).result()
            right &= bool((bucket == 6 + 4 * round_).all())
        disconnect()
        return right, len(sent) == 60 and set(sent) == {bucket.untyped_storage().data_ptr()}

    assert all(all(found) for found in launch(main, ranks=4))


def test_hosts_that_are_no_boxes_meet_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(seat: Seat) -> bool:
        connect(seat, timeout_s=30)
        monkeypatch.setenv("PLAIT_HOST", f"host{seat.rank % 2}")
        links = links_between(DATA, seat.rank, CPU, timeout_s=20)
        disconnect()
        return isinstance(links, ProcessLinks)

    assert launch(main, ranks=4) == [True] * 4


def test_messages_between_emulated_hosts_take_their_time() -> None:
    """No sooner than the network allows: 1 MB at 80 Mbit/s is 0.1 s, which the two ranks of a host share."""
    network = Emulation.parse("bandwidth=80Mbit,latency=20ms,hosts=2x2")

    def main(seat: Seat) -> list[tuple[float, float]]:
        connect(seat, timeout_s=30)
        peers = seat.store.peers()
        peers.emulate(Wire.between(network, seat.rank))
        found = []
        for partner, size in ((seat.rank ^ 2, 1), (seat.rank ^ 2, 1_000_000)):
            torch.distributed.barrier()
            began, room = time.monotonic(), bytearray(size)
            sent = peers.send(partner, size, memoryview(bytes([seat.rank]) * size))
            peers.receive(partner, size, memoryview(room)).result(20)
            found.append((began, time.monotonic()))
            assert bytes(room) == bytes([partner]) * size
            sent.result(20)
        disconnect()
        return found

    found = launch(main, ranks=4)
    # From when the other rank began to send: both read one clock.
    took = [[found[rank][size][1] - found[rank ^ 2][size][0] for size in (0, 1)] for rank in range(4)]
    assert all(small > 0.019 and large > 0.11 for small, large in took), took
    assert max(large for _, large in took) > 0.21


def wide() -> Job:
    """Larger and smaller tensors, of odd sizes."""
    return replace(
        jobs.plain(),
        model=lambda: nn.Sequential(
            nn.Linear(16, 257), nn.ReLU(), nn.Linear(257, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
    )


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("ddp", {"data": 4}),
        ("zero3", {"data": 4}),
        ("1f1b", {"data": 2, "pipe": 2}),
        ("megatron", {"data": 2, "tensor": 2}),
    ],
)
def test_plans_compute_on_emulated_hosts_what_one_process_computes(plan: str, mesh: dict[str, int]) -> None:
    assert plait.verify(wide(), plan, changes=plait.Changes(mesh=mesh), steps=2, emulate=FAST).ok


def test_networks_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="2 hosts of 2 ranks; plan ddp has 2"):
        plait.train(wide(), "ddp", 2, trial=Trial(emulate=FAST), watching=plait.Watching(progress=False))
    with pytest.raises(UsageError, match="share no memory"):
        plait.train(wide(), "hogwild", 4, trial=Trial(emulate=FAST), watching=plait.Watching(progress=False))
    with pytest.raises(UsageError, match="not on 4xA100"):
        plait.predict(wide(), "ddp", 4, cluster="4xA100", emulate=FAST)


@pytest.mark.parametrize(
    ("plan", "settings", "kinds"),
    [
        ("ddp", {"sync": {"compress": "topk"}}, ("Compress", "Decompress", "Collective")),
        ("zero3", {}, ("Collective",)),
        ("1f1b", {}, ("Send", "Recv")),
        ("local-sgd", {"average": {"every": 2}}, ("Mix", "Collective")),
    ],
)
def test_a_program_between_hosts_is_rehearsed_for_a_prediction(
    plan: str, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    network = emulated(parse_cluster("2xcpu"), Emulation.parse("bandwidth=10Gbit,latency=50us,hosts=2x1"))
    chosen = resolve(plan, 2, settings)
    found = predict_job(jobs.plain(), chosen, network, time_on="cpu")
    timed = found.cluster.device.timed
    for kind in ("Compute", "Update", *kinds):
        own = {key: 1.0 for key in timed if "|rehearsed " in key and f": {kind} " in key}
        assert own and all(timed[key] > 0 for key in own)
        slower = replace(found.cluster, device=replace(found.cluster.device, timed={**timed, **own}))
        slow = predict_job(jobs.plain(), chosen, slower)
        assert slow.prediction.step_s > 0.4 > found.prediction.step_s  # a step of two has one that averages


def test_parts_of_a_pipeline_are_timed_where_a_stage_has_nothing_to_update() -> None:
    """Its ranks had not waited for the others' updates, and met them in the next exchange."""
    job = replace(jobs.plain(), model=lambda: nn.Sequential(nn.Linear(16, 10), nn.Tanh()))
    plan = resolve("1f1b", 2, {})
    found = predict_job(job, plan, parse_cluster("2xcpu"), time_on="cpu")
    updates = [key for key in found.cluster.device.timed if "|update " in key]
    assert len(updates) == 2 and any("none" in key for key in updates)
