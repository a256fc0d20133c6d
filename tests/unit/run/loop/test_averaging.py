"""local-sgd, diloco and easgd against plain torch, in the serial interpreter and in float64."""

from typing import Any

import pytest
import torch
from bench.measured import slowed, steps_per_s
from tests.unit.run.loop.averaging_reference import (
    Workers,
    elastic_in_turn,
    elastic_step,
    outer_step,
    workers_of,
)
from tests.unit.run.training import case_job
from tests.zoo import ZOO
from torch import Tensor

from plait.errors import PlanError, UsageError
from plait.plan.named import resolve
from plait.program.instructions import Collective, Compute
from plait.program.simulate.simulator import simulate
from plait.run.parallelize import parallelize
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks
from plait.run.verify import verify


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """In float64; sums may be taken in another order."""
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def ranks_of(job: Any, plan: str, workers: int, **settings: Any) -> SerialRanks:
    programs = prepare(job, resolve(plan, workers, settings), "cpu", torch.float64, lambda event: None)
    return SerialRanks(job, programs, torch.float64)


def check(ranks: SerialRanks, workers: Workers) -> None:
    """Every worker's weights and buffers."""
    for machine, model in zip(ranks.machines, workers.models, strict=True):
        found: dict[str, Tensor] = {n: p.detach() for n, p in machine.state.parameters.items()}
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            ours = found[name] if name in found else machine.state.buffers[name]
            assert_same(ours, value.detach())


@pytest.mark.parametrize(("name", "optimizer"), [("mlp", "adamw"), ("small_batch_norm", "momentum")])
def test_local_sgd_equals_workers_that_average(name: str, optimizer: str) -> None:
    """3 workers on 22 samples in batches of 8 and 6: shares of 3, 3 and 2; warm-up, then every third step."""
    job = case_job(name, torch.float64, steps=7, optimizer=optimizer, batch=8, num_samples=22)
    ranks = ranks_of(job, "local-sgd", 3, average={"every": 3, "warmup": 2})
    workers = workers_of(job, 3)
    for step in range(7):
        assert ranks.run(step)
        workers.step(step)
        if step in (0, 1, 2, 5):
            workers.take(workers.mean())
        check(ranks, workers)


def test_once_an_epoch_and_with_empty_shares() -> None:
    """4 workers, the last step of an epoch has 1 sample: the others' weights count as much in the mean."""
    job = case_job("mlp", torch.float64, steps=6, batch=4, num_samples=9, optimizer="momentum")
    ranks = ranks_of(job, "local-sgd", 4, average={"every": "epoch"})
    workers = workers_of(job, 4)
    for step in range(6):
        assert ranks.run(step)
        workers.step(step)
        if step in (2, 5):
            workers.take(workers.mean())
        check(ranks, workers)
    assert [machine.outcome is None for machine in ranks.machines] == [False, True, True, True]


@pytest.mark.parametrize("fragments", [1, 2])
def test_diloco_equals_an_outer_optimizer_written_out(fragments: int) -> None:
    """2 workers, 4 rounds of 3 steps; of two fragments the first is averaged in the middle of a round."""
    job = case_job("mlp", torch.float64, steps=12, optimizer="adamw", num_samples=14 * 3)
    ranks = ranks_of(
        job, "diloco", 2, average={"every": 3, "outer_lr": 0.6, "outer_momentum": 0.8, "fragments": fragments}
    )
    workers = workers_of(job, 2)
    flats = ranks.programs.for_sizes([(4, 3)]).of(0).averages
    parts = [list(flat.parameters) for flat in flats]
    assert sorted(n for part in parts for n in part) == sorted(workers.center) and len(parts) == fragments
    for step in range(12):
        assert ranks.run(step)
        workers.step(step)
        for fragment, names in enumerate(parts):
            if (step + 1) % 3 == (0 if fragment == fragments - 1 else 1):
                outer_step(workers, names, 0.6, 0.8)
        check(ranks, workers)


@pytest.mark.parametrize(("momentum", "tau", "workers"), [(0.0, 1, 3), (0.9, 2, 2), (0.9, 1, 1)])
def test_easgd_of_all_at_once_by_hand(momentum: float, tau: int, workers: int) -> None:
    job = case_job("mlp", torch.float64, steps=4, optimizer="sgd")
    elastic = {"variant": "sync", "rho": 2.0, "tau": tau, "momentum": momentum}
    ranks = ranks_of(job, "easgd", workers, elastic=elastic)
    written = workers_of(job, workers)
    for step in range(4):
        assert ranks.run(step)
        elastic_step(written, step, lr=0.05, rho=2.0, momentum=momentum, meets=(step + 1) % tau == 0)
        check(ranks, written)
        for machine in ranks.machines:
            for name, center in machine.averaging.center.items():
                assert_same(center, written.center[name])


@pytest.mark.parametrize(
    ("variant", "tau", "momentum"), [("round-robin", 1, 0.0), ("round-robin", 1, 0.9), ("async", 2, 0.9)]
)
def test_easgd_one_after_the_other_by_hand(variant: str, tau: int, momentum: float) -> None:
    """Lecture 004, algorithm 1: the center moves towards one worker at a time, who is drawn to where it was.

    Here everybody gets there in the order of workers, so that as they come is the same as in turn.
    """
    job = case_job("mlp", torch.float64, steps=4, optimizer="sgd")
    elastic = {"variant": variant, "rho": 2.0, "tau": tau, "momentum": momentum}
    ranks = ranks_of(job, "easgd", 4, elastic=elastic)
    written = workers_of(job, 3)
    assert len(ranks.machines) == 3
    for step in range(4):
        assert ranks.run(step)
        elastic_in_turn(written, step, lr=0.05, rho=2.0, momentum=momentum, meets=(step + 1) % tau == 0)
        check(ranks, written)
        for name, center in ranks.weights().items():
            assert_same(center, written.center[name])


@pytest.mark.parametrize("variant", ["round-robin", "async"])
def test_the_center_takes_workers_in_turn_or_as_they_come(variant: str) -> None:
    job = case_job("mlp", torch.float64)
    ranks = ranks_of(job, "easgd", 4, elastic={"variant": variant})
    first, second, third = (machine.serving.port for machine in ranks.machines)
    assert first is not None and second is not None and third is not None
    (flat,) = ranks.programs.for_sizes([(3, 2, 2)]).of(0).averages
    weights = torch.ones(flat.num_elements, dtype=torch.float64)
    early = third.exchange(0, 3 * weights, 0.5, 0)
    ranks.turn()
    assert early.ready() == (variant == "async")
    start = first.exchange(0, weights, 0.5, 0)
    while ranks.turn():
        pass
    assert start.ready() and early.ready() == (variant == "async")
    second.leave()  # its turn goes to the third
    while ranks.turn():
        pass
    assert early.ready()
    between = (
        start.result().lerp(weights, 0.5)
        if variant == "round-robin"
        else early.result().lerp(3 * weights, 0.5)
    )
    torch.testing.assert_close(early.result() if variant == "round-robin" else start.result(), between)
    service = ranks.servers[0].serving.service
    assert service is not None and service.rule.applied == 2


def test_a_model_that_runs_eagerly_is_averaged_too() -> None:
    job = ZOO["branching"].job(batch=6, steps=4, optimizer="momentum")
    ranks = ranks_of(job, "local-sgd", 2, average={"every": 2})
    for step in range(4):
        assert ranks.run(step)
        first, second = (dict(m.state.parameters) for m in ranks.machines)
        same = all(torch.equal(first[name], second[name]) for name in first)
        assert same == (step % 2 == 1)


def test_bytes_are_a_fiftieth_of_those_of_ddp() -> None:
    job = case_job("mlp", torch.float32, steps=100, batch=6, num_samples=600)

    def sent(plan: str, **settings: Any) -> int:
        chosen = resolve(plan, 2, settings)
        programs = prepare(job, chosen, "cpu", torch.float32, lambda event: None)
        total = 0
        for step in range(100):
            program = programs.for_sizes([(3, 3)], chosen.agreement.due(step, False))
            total += sum(
                i.num_bytes
                for i in program.of(0).instructions
                if isinstance(i, Collective) and i.reads[0].kind in ("bucket", "average")
            )
        return total

    loss = 100 * 4  # ddp sums the loss of every step beside the gradients
    assert sent("ddp") - loss == 50 * sent("local-sgd", average={"every": 50})
    assert sent("ddp") - loss == 50 * sent("diloco", average={"every": 50, "fragments": 3})


def test_a_straggler_is_waited_for_once_a_round() -> None:
    """Worker 1 is three times as slow; averages take no time, so the others wait for it at the end of each round."""
    job = case_job("mlp", torch.float64, steps=8, batch=6, num_samples=48)
    plan = resolve("local-sgd", 3, {"average": {"every": 4}})
    programs = prepare(job, plan, "cpu", torch.float64, lambda event: None)
    steps = [programs.for_sizes([(2, 2, 2)], plan.agreement.due(step, False)) for step in range(4)]
    trace = simulate(
        steps,
        lambda rank, i: (3.0 if rank == 1 else 1.0) if isinstance(i, Compute) else 0.0,
        steps=8,
    )
    count = sum(isinstance(i, Compute) for i in steps[0].of(0).instructions)
    ends = {s.step: s.end_s for s in trace.spans if s.rank == 0}
    assert [ends[step] for step in (2, 3, 7)] == [3 * count, 12 * count, 24 * count]


@pytest.mark.parametrize(("variant", "wanted"), [("async", (1 + 1 + 1 / 3) / 3), ("round-robin", 1 / 3)])
def test_a_straggler_among_workers_around_a_center(variant: str, wanted: float) -> None:
    """As they come, the others do not wait for it; in turn, all do. A step takes 1 s, of the straggler 3 s."""
    job = case_job("mlp", torch.float64, steps=8, batch=6, num_samples=48)
    plan = resolve("easgd", 4, {"elastic": {"variant": variant, "tau": 2}})
    programs = prepare(job, plan, "cpu", torch.float64, lambda event: None)
    steps = [programs.for_sizes([(2, 2, 2)], plan.agreement.due(step, False)) for step in range(2)]
    count = sum(isinstance(i, Compute) for i in steps[0].of(0).instructions)
    duration = slowed(lambda rank, i: 1 / count if isinstance(i, Compute) else 0.0, {1: 3.0})
    found = steps_per_s(simulate(steps, duration, steps=80), 3)
    assert found == pytest.approx(wanted, rel=0.02)


def test_when_what_is_due() -> None:
    def steps(plan: str, count: int, **settings: Any) -> list[tuple[int, ...]]:
        return [resolve(plan, 2, settings).agreement.due(step, step % 5 == 4) for step in range(count)]

    none: tuple[int, ...] = ()
    assert steps("local-sgd", 6, average={"every": 3, "warmup": 1}) == [(0,), none, (0,), none, none, (0,)]
    assert steps("local-sgd", 6, average={"every": "epoch"}) == [none] * 4 + [(0,), none]
    assert steps("diloco", 5, average={"every": 4, "fragments": 3}) == [(0,), (1,), none, (2,), (0,)]
    assert steps("diloco", 2, average={"every": 1}) == [(0,), (0,)]
    assert steps("easgd", 4, elastic={"variant": "sync", "tau": 2}) == [none, (0,), none, (0,)]
    assert steps("easgd", 4, elastic={"variant": "async", "tau": 2}) == [none, (0,), none, (0,)]
    assert steps("ddp", 2) == [none, none]
    plans = [resolve("easgd", 2, {"elastic": {"tau": 3}}), resolve("local-sgd", 2), resolve("ddp", 2)]
    assert [plan.agreement.round for plan in plans] == [3, 10, 1]


def test_more_fragments_than_steps_of_a_round_are_refused() -> None:
    with pytest.raises(PlanError, match=r"fragments=3.*every=2"):
        resolve("diloco", 2, {"average": {"every": 2, "fragments": 3}})


def test_one_worker_is_one_process() -> None:
    """Compared with `single`, three rounds of one step; what differs on purpose says so."""
    job = case_job("small_batch_norm", torch.float64, optimizer="adamw", clip_norm=0.1, accumulate=2)
    same = {"average": {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}}
    for plan in ("local-sgd", "diloco"):
        found = verify(job, plan, 1, serial=True, settings=same)
        assert found.ok, found.first
    for plan, ranks in (("diloco", 1), ("local-sgd", 2)):
        with pytest.raises(UsageError, match="no run of one rank computes the same"):
            verify(job, plan, ranks, serial=True)


def test_a_loop_of_the_users_own_takes_plans_whose_workers_march() -> None:
    job = case_job("mlp", torch.float32)
    for plan, told in (
        ("hogwild", "memory that only a parent"),
        ("server-async", "a rank that makes no steps"),
    ):
        with pytest.raises(PlanError, match=told):
            parallelize(job, resolve(plan, 1 if plan == "hogwild" else 2))
    with pytest.raises(PlanError, match="at the end of an epoch"):
        parallelize(job, "local-sgd", settings={"average": {"every": "epoch"}})
    batch = tuple(
        torch.stack([torch.as_tensor(value) for value in column])
        for column in zip(*list(job.data)[:6], strict=True)
    )
    steps = [parallelize(job, plan) for plan in ("single", "local-sgd")]
    for _ in range(3):
        first, second = (step(batch) for step in steps)
        assert first == second
    with steps[1].whole_model() as model:
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), steps[0].model.parameters(), strict=True)
        )
