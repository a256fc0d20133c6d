"""Sketches: bubbles are the schedule's, lanes overlap, and compiled programs on the same cluster take as long."""

from dataclasses import replace

import pytest

from plait.cluster.parse import parse_cluster
from plait.graph.from_job import Captures
from plait.job.paper.job import paper_job
from plait.plan.decisions import Memory, Pipe, Tensor
from plait.plan.mesh import Mesh
from plait.plan.plan import Plan
from plait.program.simulate.schedule_clock import durations, program_of_schedule
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Action, Costs
from plait.run.measure.predict import predict_job
from plait.search.choose.subject import state_bytes
from plait.search.predict.memory_rule import StateBytes
from plait.search.predict.model_costs import ModelCosts, with_blocks
from plait.search.predict.sketch import Sketcher
from plait.search.predict.sketch_clock import Overlap, course, course_times, overlapped
from plait.search.predict.unit_costs import CAPTURED, model_costs
from plait.search.published.style import Style

CLUSTER = parse_cluster("8xA100")
TEXT = "gpt:layers=4,hidden=512,heads=8,seq=256,vocab=1024,tied=false,precision=fp32"
BATCH = 32


def plan_of(
    *, zero: int = 0, recompute: str = "none", schedule: str = "1f1b", sequence: bool = False, **axes: int
) -> Plan:
    return Plan(
        name="ddp",
        mesh=Mesh(axes=tuple((name, axes.get(name, 1)) for name in ("pipe", "data", "tensor"))),
        memory=Memory(zero=zero, recompute=recompute),
        pipe=Pipe(schedule=schedule),
        tensor=Tensor(sequence=sequence),
    )


@pytest.fixture(scope="module")
def captures() -> Captures:
    return Captures(paper_job(TEXT, batch=BATCH))


@pytest.fixture(scope="module")
def costs(captures: Captures) -> dict[int, ModelCosts]:
    graph = captures.of_size(CAPTURED)
    return {width: model_costs(graph, plan_of(tensor=width)) for width in (1, 2)}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_pipelines_have_the_clocks_of_their_programs(name: str) -> None:
    times = Costs(forward=1.0, input=1.3, weight=0.7)
    actions = SCHEDULES[name](4, 2 if name == "interleaved" else 1, 8)
    stages = 1 + max(action.stage for own in actions for action in own)
    taken = {"forward": 1.0, "input": 1.3, "weight": 0.7, "backward": 2.0}

    def seconds(action: Action) -> float:
        return taken[action.kind]

    found = course_times(course(actions, stages), seconds, 0.05)
    trace = simulate(program_of_schedule(name, actions), durations(times, message=0.05))
    ends = [max(s.end_s for s in trace.spans if s.rank == r and s.lane == "compute") for r in range(4)]
    assert found.ends_s == pytest.approx(ends)
    busy = sum(taken[action.kind] for own in actions for action in own)
    assert found.bubble == pytest.approx(1 - busy / (4 * max(ends)))


def test_communication_hides_behind_later_units() -> None:
    units = [Overlap(compute_s=1.0, after_s=0.8), Overlap(compute_s=1.0, after_s=0.8)]
    assert overlapped(units) == pytest.approx((2.0, 2.8))
    late = [Overlap(compute_s=1.0, before_s=0.5), Overlap(compute_s=1.0, before_s=1.5)]
    assert overlapped(late) == pytest.approx((3.0, 3.0))


@pytest.mark.parametrize(
    ("plan", "accumulate"),
    [
        (plan_of(), 2),
        (plan_of(data=4), 2),
        (plan_of(data=2, zero=3), 1),
        (plan_of(tensor=2), 2),
        (plan_of(pipe=2), 8),
        (plan_of(recompute="full"), 1),
    ],
    ids=["single", "data", "zero3", "tensor", "pipe", "recompute"],
)
def test_a_sketch_agrees_with_the_compiled_program(
    plan: Plan, accumulate: int, captures: Captures, costs: dict[int, ModelCosts]
) -> None:
    """Programs cut bucket by bucket, sketches unit by unit: steps within a quarter, state alike."""
    job = replace(captures.job, accumulate=accumulate)
    exact = predict_job(job, plan, CLUSTER, captures=captures).exact.prediction
    sketcher = Sketcher(
        costs[plan.mesh.size_of("tensor")], CLUSTER, state_bytes(job, captures.of_size(CAPTURED))
    )
    sketch = sketcher.predict(plan, micro_batch=BATCH // accumulate // plan.data_ranks, batch=BATCH)
    constant = CLUSTER.device.calibration.step_s
    assert sketch.step_s - constant == pytest.approx(exact.step_s - constant, rel=0.25)
    assert sketch.model_flops == pytest.approx(exact.model_flops, rel=0.1)
    if plan.mesh.size_of("pipe") == 1:
        assert sketch.memory.parameters == pytest.approx(exact.memory.parameters, rel=0.02)
        assert sketch.memory.optimizer == pytest.approx(exact.memory.optimizer, rel=0.02)
        assert sketch.memory.activations + sketch.memory.buffers == pytest.approx(
            exact.memory.activations + exact.memory.buffers, rel=0.3
        )


@pytest.mark.parametrize(("zero", "accumulate"), [(0, 2), (1, 1), (2, 2), (3, 2)])
def test_a_sketch_sends_what_the_compiled_program_sends(
    zero: int, accumulate: int, captures: Captures, costs: dict[int, ModelCosts]
) -> None:
    """Within what zero3 gathers once for two uses."""
    job, plan = replace(captures.job, accumulate=accumulate), plan_of(data=4, zero=zero)
    exact = predict_job(job, plan, CLUSTER, captures=captures).exact.prediction
    sketcher = Sketcher(costs[1], CLUSTER, state_bytes(job, captures.of_size(CAPTURED)))
    sketch = sketcher.predict(plan, micro_batch=BATCH // accumulate // 4, batch=BATCH)
    assert sketch.sent_bytes["data"] == pytest.approx(exact.sent_bytes["data"], rel=0.02)


def test_memory_is_traded_for_time_and_for_ranks(costs: dict[int, ModelCosts]) -> None:
    sketcher = Sketcher(costs[1], CLUSTER)
    kept = {
        recompute: sketcher.predict(plan_of(recompute=recompute), micro_batch=8, batch=32)
        for recompute in ("none", "selective", "full")
    }
    used = [kept[name].memory.activations for name in ("none", "selective", "full")]
    assert used == sorted(used, reverse=True) and used[0] > 2 * used[2]
    assert kept["full"].step_s > kept["none"].step_s
    totals = [
        sketcher.predict(plan_of(data=4, zero=z), micro_batch=8, batch=32).memory.total for z in range(4)
    ]
    assert totals[0] > totals[1] > totals[2] > totals[3]
    tight = sketcher.predict(plan_of(), micro_batch=8, batch=32, limit_bytes=2**20)
    assert not tight.fits and tight.reason is not None and tight.reason.endswith("of 1.0 MiB")


def test_more_blocks_are_counted_not_captured(costs: dict[int, ModelCosts]) -> None:
    deep = with_blocks(costs[1], 96)
    assert sum(unit.repeat for unit in deep.units if unit.is_block) == 96
    block = next(unit for unit in deep.units if unit.is_block)
    assert deep.parameters - costs[1].parameters == pytest.approx(92 * block.parameters)


def test_a_systems_style_changes_widths_and_kernels(captures: Captures) -> None:
    graph = captures.of_size(CAPTURED)
    plain, half = (
        model_costs(graph, plan_of(), Style(half=half, fused=half).reader()) for half in (False, True)
    )
    assert (plain.dtype, half.dtype) == ("float32", "bfloat16")
    blocks = [next(unit for unit in found.units if unit.is_block) for found in (plain, half)]
    assert blocks[1].kept["none"].at(1) == pytest.approx(blocks[0].kept["none"].at(1) / 2, rel=0.02)
    assert len(blocks[1].steps) <= len(blocks[0].steps)
    assert blocks[0].parameters == blocks[1].parameters


@pytest.mark.parametrize(("schedule", "sums"), [("gpipe", 8), ("1f1b", 8), ("zero-bubble", 7)])
def test_gradients_are_added_up_once_a_micro_batch_and_only_by_backwards(
    schedule: str, sums: int, costs: dict[int, ModelCosts]
) -> None:
    """8 micro-batches are 7 sums, of two stages 7 of half; the last backward of the first stage waits for one more,
    where it does not wait for gradients of inputs alone."""

    def sums_s(plan: Plan) -> float:
        steps = [
            Sketcher(costs[1], CLUSTER, StateBytes(accumulate=each)).predict(plan, micro_batch=4, batch=32)
            for each in (1e6, 2e6)
        ]
        return steps[1].step_s - steps[0].step_s

    whole = sums_s(plan_of())
    assert sums_s(plan_of(pipe=2, schedule=schedule)) == pytest.approx(sums / 7 * whole / 2, rel=0.03)
