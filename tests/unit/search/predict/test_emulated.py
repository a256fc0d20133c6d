"""What pays on a slow network between hosts, as the simulator has it on the numbers of an emulated one."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import plait
from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.job.job import Job
from plait.options import Emulation

SLOW = emulated(parse_cluster("4xcpu"), Emulation.parse("bandwidth=100Mbit,latency=5ms,hosts=2x2"))


def chain() -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 10)),
        data=(torch.randn(64, 128), torch.zeros(64, dtype=torch.int64)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=64,
        epochs=1,
    )


def step_s(plan: str, settings: dict[str, Any]) -> float:
    return plait.predict(
        chain(), plan, 4, changes=plait.Changes(settings=settings), cluster=SLOW
    ).prediction.step_s


def test_overlap_larger_buckets_and_averaging_now_and_then_pay() -> None:
    usual = step_s("ddp", {"sync": {"bucket_mib": 0.1}})
    assert usual < step_s("ddp", {"sync": {"bucket_mib": 0.1, "overlap": False}})
    assert usual < step_s("ddp", {"sync": {"bucket_mib": 0}})  # each tensor waits for the network
    assert step_s("ddp", {"sync": {"bucket_mib": 0.1, "compress": "bf16"}}) < usual
    assert step_s("local-sgd", {"average": {"every": 8}}) < usual / 2


def test_sending_costs_processors_time() -> None:
    """More of it where more ranks than processors share them; with overlap less: some is beside the wire."""
    network = Emulation.parse("bandwidth=100Gbit,latency=0ms,hosts=2x2")
    few, many = (emulated(parse_cluster(f"{count}xcpu"), network) for count in (2, 4))
    assert few.between.work_s == 2 * many.between.work_s > 0
    free = replace(few, between=replace(few.between, work_s=0.0, work_s_per_byte=0.0))

    def found(overlap: bool) -> list[float]:
        settings = {"sync": {"bucket_mib": 0.1, "overlap": overlap}}
        return [
            plait.predict(
                chain(), "ddp", 4, changes=plait.Changes(settings=settings), cluster=cluster
            ).prediction.step_s
            for cluster in (few, free)
        ]

    overlapped, one_by_one = (taken - free for taken, free in map(found, (True, False)))
    assert one_by_one > overlapped > 0


def test_wires_of_hosts_are_shared_and_levels_save_them() -> None:
    """On one host of four nothing passes a wire; on four hosts of one everything does."""
    network = Emulation.parse("bandwidth=100Mbit,latency=5ms,hosts=4x1")
    apart = emulated(parse_cluster("4xcpu"), network)
    settings = {"sync": {"bucket_mib": 8}}
    found = [
        plait.predict(
            chain(), "ddp", 4, changes=plait.Changes(settings=settings), cluster=cluster
        ).prediction.step_s
        for cluster in (parse_cluster("4xcpu"), SLOW, apart)
    ]
    assert found[0] < found[1] < found[2]
