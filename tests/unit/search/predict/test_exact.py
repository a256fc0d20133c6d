"""Exact predictions: durations of instructions, numbers of a step, memory by kind."""

from dataclasses import replace

import pytest
import torch
from tests.unit.program.exact_programs import compiled, durations_of, job_of

from plait.cluster.cluster import Cluster
from plait.cluster.parse import parse_cluster
from plait.program.cost.collective_time import collective_seconds
from plait.program.cost.memory import step_memory
from plait.program.cost.op_key import op_key, transfer_key, update_key
from plait.program.cost.step_times import step_times
from plait.program.cost.update import update_work, updated_parts
from plait.program.instructions import Collective, Compute, Send, Update, Wait
from plait.program.simulate.simulator import simulate
from plait.report.breakdown import PARTS, breakdown
from plait.search.predict.exact import exact_prediction, memory_use

A100 = parse_cluster("1x8xA100")


def timed(cluster: Cluster, times: dict[str, float]) -> Cluster:
    return replace(cluster, device=replace(cluster.device, timed=times))


def test_what_was_timed_is_taken_and_the_rest_is_modelled() -> None:
    program = compiled("mlp", "ddp", {"data": 2}, 8)
    own = program.classes[0]
    computes = [i for i in own.instructions if isinstance(i, Compute)]
    reduce = next(i for i in own.instructions if isinstance(i, Collective))
    update = next(i for i in own.instructions if isinstance(i, Update))
    nodes = [node for compute in computes for node in own.segments[compute.segment].nodes]
    times = {op_key(node, 2): 1.0 for node in nodes}
    times[transfer_key(reduce, 2, 2)] = 5.0
    times[update_key("AdamW", [part.shape for part in updated_parts(program, 0)], 2)] = 7.0
    found = durations_of(program, timed(A100, times))
    assert sum(found.duration(0, compute) for compute in computes) == len(nodes)
    assert (found.duration(0, reduce), found.duration(0, update)) == (5.0, 7.0)
    modelled = durations_of(program, A100)
    reach = A100.link_among((0, 1))
    assert modelled.duration(0, reduce) == collective_seconds(
        "all_reduce", reduce.num_bytes, reach, A100.device
    )
    assert 0 < modelled.duration(0, computes[0]) < 1e-3


def test_links_without_a_background_make_ranks_do_their_part() -> None:
    """On the clocks of the processor, an exchange cannot be hidden behind work."""
    program = compiled("mlp", "ddp", {"data": 2}, 8, settings={"sync": {"bucket_mib": 0}})
    hidden = parse_cluster("2xcpu")
    shown = replace(
        hidden, pair=replace(hidden.pair, background=True), host=replace(hidden.host, background=True)
    )
    slow = {transfer_key(i, 2, 2): 1.0 for i in program.classes[0].instructions if isinstance(i, Collective)}
    waits = sum(isinstance(i, Wait) for i in program.classes[0].instructions)
    results = []
    for cluster in (hidden, shown):
        times = durations_of(program, timed(cluster, slow))
        results.append(step_times(program, simulate(program, times.duration, own_part=times.own_part)))
    own, background = results
    assert own.exposed_s == pytest.approx(waits, rel=0.01)
    assert background.exposed_s <= own.exposed_s


@pytest.mark.parametrize(("plan", "axis"), [("1f1b", "pipe"), ("ddp", "data"), ("zero3", "data")])
def test_the_breakdown_of_a_predicted_trace_adds_up_to_the_predicted_step(plan: str, axis: str) -> None:
    """What no device does in a step (data, learning rate, logging) is in both."""
    program = compiled("gpt", plan, {axis: 2}, 8, 4)
    assert A100.device.calibration.step_s > 0
    found = exact_prediction(program, A100, job_of("gpt", 8, 4).build_optimizer, model_flops=1.0)
    for rank in breakdown(found.trace):
        assert rank.step_s == pytest.approx(found.prediction.step_s)
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step_s)
        assert rank.other_s == pytest.approx(A100.device.calibration.step_s)


def test_pipelines_show_their_bubble() -> None:
    """Where messages and updates are free, a rank that does not compute waits for the other stage."""
    program = compiled("gpt", "gpipe", {"pipe": 2}, 8, 4)
    own = [program.of(rank).instructions for rank in range(2)]

    def duration(rank: int, instruction: object) -> float:
        return 1.0 if isinstance(instruction, Compute) and instruction.micro_batch is not None else 0.0

    found = step_times(program, simulate(program, duration))
    per_rank = [sum(duration(rank, i) for i in own[rank]) for rank in range(2)]
    busy = sum(per_rank) / 2
    # Joining total and weight over the pipe is waiting for a collective, which is counted apart.
    assert found.bubble + found.exposed_s / found.step_s == pytest.approx(1 - busy / found.step_s, abs=1e-9)
    assert 0.1 < found.bubble < 0.35
    sent = sum(i.num_bytes for i in own[0] if isinstance(i, Send))
    assert found.sent_bytes["pipe"] >= sent > 0


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2), ("rmsprop", 1)])
def test_optimizers_tell_their_state_without_memory(optimizer: str, states: int) -> None:
    program = compiled("mlp", "ddp", {"data": 2}, 8)
    work = update_work(program, 0, job_of("mlp", 8, 1, optimizer).build_optimizer)
    counters = 4 * len(work.shapes) if optimizer in ("adamw", "rmsprop") else 0
    assert work.state_bytes == states * work.parameter_bytes + counters
    assert work.extra_bytes(at_once=True) == (work.parameter_bytes if states == 2 else 0)
    assert work.extra_bytes(at_once=False) <= work.extra_bytes(at_once=True)


def test_zero_cuts_what_is_updated() -> None:
    whole = compiled("gpt", "ddp", {"data": 4}, 8)
    cut = compiled("gpt", "zero3", {"data": 4}, 8)
    count = lambda program, rank: sum(torch.Size(p.shape).numel() for p in updated_parts(program, rank))  # noqa: E731
    assert sum(count(cut, rank) for rank in range(4)) == count(whole, 0)
    assert max(count(cut, rank) for rank in range(4)) < 0.3 * count(whole, 0)


def test_prediction_adds_up() -> None:
    program = compiled("gpt", "zero3", {"data": 4}, 8)
    build = job_of("gpt", 8, 1).build_optimizer
    exact = exact_prediction(program, A100, build, model_flops=1e9, limit_bytes=1e9)
    found = exact.prediction
    step = step_memory(program)
    use = memory_use(program, 0, update_work(program, 0, build))
    assert found.memory.parameters == step.parameters == use.parameters
    assert found.memory.total - found.memory.overhead == pytest.approx(use.total)
    assert not found.fits and "of 954 MiB" in str(found.reason)
    assert replace(found, limit_bytes=1e12).fits
    assert found.step_s > A100.device.calibration.step_s
    assert {span.step for span in exact.trace.spans} == {0, 1, 2}
    assert found.sent_bytes["data"] > step.parameters


def test_loose_gradients_take_the_place_of_activations() -> None:
    """On one rank gradients come to be one after the other: both peaks are not at once."""
    found = step_memory(compiled("gpt", "single", {}, 8))
    assert found.flat_gradients == 0
    assert found.activations <= found.together < found.activations + found.gradients
    flat = step_memory(compiled("gpt", "ddp", {"data": 2}, 8))
    assert flat.flat_gradients == flat.gradients and flat.together == flat.activations
