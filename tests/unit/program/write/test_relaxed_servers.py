"""Programs of workers with servers: what is pushed and pulled where, what is refused, and what clocks make of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from bench.measured import measured_durations, slowed, steps_per_s
from tests.ranks import jobs
from torch import nn

from plait.errors import PlanError, ProgramError
from plait.plan.named import resolve
from plait.program.check.soundness import check_program
from plait.program.instructions import (
    Accumulate,
    Compute,
    Exchange,
    Instruction,
    Outcome,
    Pull,
    Push,
    PushBuffers,
    Serve,
    Update,
    Wait,
)
from plait.program.program import Program
from plait.program.simulate.event_clock import Duration
from plait.program.simulate.simulator import simulate
from plait.program.value import Value
from plait.program.write.push_pull import check_served
from plait.run.prepare.prepare import prepare


@cache
def program_of(name: str, ranks: int, *, norm: bool = False, **sync: object) -> Program:
    plan = resolve(name, ranks, {"sync": {"bucket_mib": 0.001, **sync}})
    job = jobs.dropout()
    if not norm:
        model = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))  # noqa: E731
        job = replace(job, model=model)
    return prepare(job, plan, "cpu", torch.float32, lambda event: None).full_step()


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of("server-async", 3, norm=True)


def test_weights_are_asked_for_in_the_order_of_the_forward_and_awaited_at_first_use(program: Program) -> None:
    entry = program.of(0)
    first_use: dict[int, int] = {}
    for instruction in entry.instructions:
        for index, bucket in enumerate(entry.buckets):
            names = {Value.parameter(name) for name in bucket.parameters}
            if isinstance(instruction, Compute) and names & set(instruction.reads):
                first_use.setdefault(index, instruction.id)
    pulls = [i for i in entry.instructions if isinstance(i, Pull)]
    assert len(pulls) > 1
    assert [i.id for i in pulls] == list(range(len(pulls)))
    assert [i.bucket for i in pulls] == sorted(first_use, key=first_use.__getitem__)
    for pull in pulls:
        (wait,) = [i for i in entry.instructions if isinstance(i, Wait) and i.of == pull.id]
        assert first_use[pull.bucket] == wait.id + 1


def test_buckets_are_pushed_while_the_backward_goes_on_and_nobody_updates(program: Program) -> None:
    kinds = [type(i) for i in program.of(0).instructions]
    assert Update not in kinds
    assert kinds.count(Push) == len(program.buckets)
    first_push = kinds.index(Push)
    assert kinds[first_push - 1] is Accumulate
    assert Compute in kinds[first_push:]  # the rest of the backward
    assert kinds[-2:] == [PushBuffers, Outcome]
    assert [type(i) for i in program.of(2).instructions] == [Serve]


@pytest.mark.parametrize("dropped", [Push, Pull])
def test_a_program_that_forgets_a_bucket_is_refused(program: Program, dropped: type[Instruction]) -> None:
    entry, server = program.classes
    gone = next(i for i in entry.instructions if isinstance(i, dropped))
    kept = tuple(
        i for i in entry.instructions if i is not gone and not (isinstance(i, Wait) and i.of == gone.id)
    )
    with pytest.raises(ProgramError, match="pushed 0 times|pulled 0 times"):
        check_program(replace(program, classes=(replace(entry, instructions=kept), server)))


def test_a_bucket_that_is_pushed_before_it_is_full_is_refused(program: Program) -> None:
    entry = program.of(0)
    push = next(i for i in entry.instructions if isinstance(i, Push))
    early = tuple(replace(i, id=-1) if i is push else i for i in entry.instructions)
    check_served(entry)
    with pytest.raises(ProgramError, match="pushed 1 times, or before it is full"):
        check_served(replace(entry, instructions=early))


def test_only_server_stale_leaves_a_known_weight_to_the_server(program: Program) -> None:
    def scalars(found: Program) -> set[str]:
        return {name for bucket in found.buckets for name in bucket.scalars}

    assert scalars(program) == scalars(program_of("server-sync", 3)) == {"total"}
    assert scalars(program_of("server-stale", 3)) == {"total", "weight"}


@pytest.mark.parametrize(
    ("name", "ranks", "sync", "told"),
    [
        ("server-async", 2, {"servers": 2}, "2 ranks of which 2 are servers leave no worker"),
        ("server-sync", 3, {"servers": 0}, "has no server"),
        ("server-stale", 3, {"staleness": -1}, "sync.staleness=-1"),
        ("server-async", 3, {"staleness": 1}, "says nothing about server-async"),
    ],
)
def test_what_cannot_be_is_refused(name: str, ranks: int, sync: dict[str, int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        resolve(name, ranks, {"sync": sync})


def test_several_servers_need_an_optimizer_that_works_on_parts() -> None:
    job = replace(jobs.plain(), optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.1))
    prepare(job, resolve("server-sync", 3), "cpu", torch.float32, lambda event: None)
    plan = resolve("server-sync", 4, {"sync": {"servers": 2}})
    with pytest.raises(PlanError, match="cannot update parts"):
        prepare(job, plan, "cpu", torch.float32, lambda event: None)


def throughput(program: Program, duration: Duration, slow: Mapping[int, float] | None = None) -> float:
    """Steps a second."""
    trace = simulate(program, slowed(duration, slow or {}), steps=60)
    return steps_per_s(trace, program.plan.mesh.size)


def compute_only(rank: int, instruction: Instruction) -> float:
    """A worker computes for 1 s a segment; everything else takes no time."""
    return 1.0 if isinstance(instruction, Compute) else 0.0


@pytest.mark.parametrize("name", ["server-sync", "server-stale", "server-async"])
def test_a_straggler_holds_up_those_who_wait(name: str) -> None:
    program = program_of(name, 3)
    segments = sum(isinstance(i, Compute) for i in program.of(0).instructions)
    even = throughput(program, compute_only)
    slow = throughput(program, compute_only, slow={0: 3.0})
    assert even == pytest.approx(1 / segments, rel=0.05)
    wanted = 1 / segments / 3 if name != "server-async" else (1 + 1 / 3) / 2 / segments
    assert slow == pytest.approx(wanted, rel=0.05)


def test_a_server_that_is_busy_all_the_time_sets_the_pace() -> None:
    def duration(rank: int, instruction: Instruction) -> float:
        return 1.0 if isinstance(instruction, Serve) else 0.0

    program = program_of("server-async", 4)
    assert throughput(program, duration) == pytest.approx(1 / 3, rel=0.05)  # 3 updates make a step


def test_every_push_of_every_worker_is_handled() -> None:
    program = program_of("server-stale", 4, servers=2)
    trace = simulate(program, compute_only, steps=5)
    handled = Counter(span.rank for span in trace.spans if span.name == "push")
    assert handled == dict.fromkeys((2, 3), 2 * 5 * len(program.buckets))
    assert sum(span.name == "update" for span in trace.spans) == 2 * 5


@pytest.mark.parametrize("name", ["server-sync", "server-async", "server-stale", "easgd"])
def test_what_servers_and_workers_take_is_learned_from_a_trace(name: str) -> None:
    """Waiting for each other is not part of it: a straggler can be tried on what was learned without one."""
    program = program_of(name, 4, bucket_mib=8.0)
    seconds = {Compute: 5.0, Push: 0.5, Pull: 0.25, Exchange: 0.5, Serve: 1.0}

    def duration(rank: int, instruction: Instruction) -> float:
        return 0.0 if isinstance(instruction, Pull) and rank < 3 else seconds.get(type(instruction), 0.0)

    def own_part(rank: int, started: Instruction) -> float:
        return 0.75 if isinstance(started, Pull | Exchange) else 0.0

    learned = measured_durations(simulate(program, duration, steps=40, own_part=own_part), program)
    for slow in ({}, {1: 3.0}):
        wanted = simulate(program, slowed(duration, slow), steps=40, own_part=own_part)
        found = simulate(program, slowed(learned.duration, slow), steps=40, own_part=learned.own_part)
        assert steps_per_s(found, 3) == pytest.approx(steps_per_s(wanted, 3), rel=0.02)
