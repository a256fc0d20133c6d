"""Stragglers that are tried out: a slowed rank sleeps after what it computes, and computes the same."""

import itertools
import time

import pytest
import torch
from tests.zoo import ZOO

from plait.cli.options import parse_slow
from plait.errors import UsageError
from plait.plan.named import resolve
from plait.program.instructions import Compute
from plait.run.prepare.prepare import prepare
from plait.run.prepare.rules import check_slow
from plait.run.proof.serial_run import SerialRanks


def test_a_slowed_rank_sleeps_for_a_multiple_of_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = ZOO["mlp"].job(batch=8, steps=1), resolve("ddp", 2)
    programs = prepare(job, plan, "cpu", torch.float32, lambda event: None)
    ranks = SerialRanks(job, programs, torch.float32)
    ranks.machines[1].straggler.factor = 3.0
    clock_ns, slept_ns = itertools.count(0, 1_000_000), [0]

    def sleep(seconds: float) -> None:
        slept_ns.append(round(seconds * 1e9) + 200_000)  # they are always too long

    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock_ns) + sum(slept_ns))
    monkeypatch.setattr(time, "sleep", sleep)
    assert ranks.run(0)
    program = programs.for_sizes([(4, 4)])
    count = sum(isinstance(i, Compute) for i in program.of(1).instructions)
    assert count > 1
    # The clock ticks once while each is computed, and once while it is slept: what is too long does not add up.
    assert sum(slept_ns) + count * 1_000_000 == pytest.approx(2 * count * 1_000_000, abs=1_500_000)


def test_what_is_no_straggler_is_refused() -> None:
    assert parse_slow(["1=3", "0=1.5"]) == {1: 3.0, 0: 1.5}
    for text in ("1", "one=3", "1=", "=2"):
        with pytest.raises(UsageError, match="RANK=FACTOR"):
            parse_slow([text])
    plan = resolve("server-async", 3)
    check_slow({1: 3.0}, plan, "cpu")
    for slow, device, told in (
        ({2: 3.0}, "cpu", "names no worker; there are 2"),  # rank 2 is the server
        ({1: 0.5}, "cpu", "makes nothing slower"),
        ({1: 2.0}, "cuda", "processors only"),
    ):
        with pytest.raises(UsageError, match=told):
            check_slow(slow, plan, device)
