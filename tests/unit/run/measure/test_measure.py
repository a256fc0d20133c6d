"""Measuring: fits, foreign load, the times of a program's parts, what cannot fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.program.exact_programs import compiled, durations_of, job_of
from tests.zoo import ZOO

import plait
from plait.cluster.parse import parse_cluster
from plait.errors import CaptureError, PlanError, UsageError
from plait.program.cost.collective_time import collective_seconds
from plait.program.cost.op_key import compress_key, op_key, update_key
from plait.program.cost.update import updated_parts
from plait.program.instructions import Compress, Compute, Decompress
from plait.run.measure.compress_times import time_compression
from plait.run.measure.fit import fit_line, fit_saturating, socket_link
from plait.run.measure.links.transfer_times import transfers_of
from plait.run.measure.load import complaint, spread
from plait.run.measure.op_times import time_ops, typical
from plait.run.measure.predict import predict_job
from plait.run.prepare.fits import memory_limit


def test_lines_are_found_again() -> None:
    found = fit_line([(size, 2e-5 + size * 3e-10) for size in (4e3, 6e4, 5e5, 4e6)])
    assert [found.start_s, found.per_unit_s] == pytest.approx([2e-5, 3e-10])
    assert max(abs(error) for error in found.residuals.values()) < 1e-9
    off = fit_line([(1.0, 1.0), (2.0, 2.5), (3.0, 3.0)])
    assert max(abs(error) for error in off.residuals.values()) > 0.05


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_link_gives_the_sums_again_that_it_was_fitted_to(ranks: int) -> None:
    line = fit_line([(size, 2e-3 + size * 8e-9) for size in (1e5, 1e6, 1e7)])
    cluster = parse_cluster(f"{ranks}x1xcpu")
    fitted = replace(cluster, between=socket_link(line, ranks, cluster.device.calibration))
    reach = fitted.link_among(range(ranks))
    assert collective_seconds("all_reduce", 1e6, reach, cluster.device) == pytest.approx(1e-2)


def test_rates_that_saturate_are_found_again() -> None:
    best, half, residuals = fit_saturating([(n, 5e10 * n / (n + 40)) for n in (64.0, 128.0, 512.0, 1024.0)])
    assert [best, half] == pytest.approx([5e10, 40.0])
    assert max(abs(error) for error in residuals.values()) < 1e-9


def test_ops_that_lose_their_processor_now_and_then_take_together_as_long_as_a_pass() -> None:
    """Of three ops of 1, 2 and 3 one is interrupted for 6 in each pass: no median shows it, but a pass takes 12."""
    times = [[7.0, 1.0, 1.0], [2.0, 8.0, 2.0], [3.0, 3.0, 9.0]]
    assert typical(times) == [2.0, 4.0, 6.0]
    assert typical([[1.0, 1.0], [2.0, 2.0]]) == [1.0, 2.0]
    assert typical([[0.0], [0.0]]) == [0.0, 0.0]


def test_foreign_load_is_told() -> None:
    assert complaint(0.1, 0.05) is None
    assert "3.1 of" in str(complaint(3.1, 0.05))
    assert "differ by 50 %" in str(complaint(0.0, 0.5))
    assert spread([1.0] * 10) == 0 and spread([1.0, 2.0, 3.0, 4.0, 5.0]) > 0.5


@pytest.mark.parametrize("case", ["mlp", "gpt_dropout", "resnet_bn", "lstm", "masked_gpt"])
def test_every_op_of_a_program_is_timed(case: str) -> None:
    program = compiled(case, "single", {}, 4)
    own = program.classes[0]
    batch = list(torch.utils._pytree.tree_leaves(ZOO[case].samples(4, 0)))
    found = time_ops(own, batch, torch.device("cpu"), busy=1, passes=1)
    names = {i.segment for i in own.instructions if isinstance(i, Compute)}
    wanted = {op_key(node, 1) for name in names for node in own.segments[name].nodes}
    assert found.seconds.keys() == wanted
    assert all(seconds > 0 for seconds in found.seconds.values()) and found.host_s == 0


def test_parts_are_timed_between_processes_and_used() -> None:
    """Two processes time their ops, updates and exchanges; the second prediction needs no new ones."""
    job = job_of("gpt", 8, 1)
    plan = plait.resolve("ddp", 2)
    first = predict_job(job, plan, parse_cluster("2xcpu"), time_on="cpu")
    program = compiled("gpt", "ddp", {"data": 2}, 8)
    known = first.cluster.device.timed
    assert {exchange.key for exchange in transfers_of(program, 2)} <= known.keys()
    assert update_key("AdamW", [part.shape for part in updated_parts(program, 0)], 2) in known
    prediction = first.exact.prediction
    compute_s = sum(
        known[op_key(node, 2)]
        for i in program.classes[0].instructions
        if isinstance(i, Compute)
        for node in program.classes[0].segments[i.segment].nodes
    )
    assert prediction.step_s > compute_s > 0
    again = predict_job(job, plan, first.cluster)
    assert again.exact.prediction.step_s == pytest.approx(prediction.step_s)


@pytest.mark.parametrize("method", ["bf16", "powersgd", "topk"])
def test_what_compression_takes_is_timed_and_used(method: str) -> None:
    program = compiled("mlp", "ddp", {"data": 2}, 8, settings={"sync": {"compress": method}})
    plan, own, cpu = program.plan, program.classes[0], torch.device("cpu")
    rounds = 0

    def meet() -> None:
        nonlocal rounds
        rounds += 1

    timed = time_compression(own, plan.mesh, plan.sync, cpu, 2, meet)
    wanted = [i for i in own.instructions if isinstance(i, Compress | Decompress)]
    keys = [compress_key(i, own.buckets[i.bucket], plan.sync, 2) for i in wanted]
    assert len(keys) >= 2 and set(keys) == timed.keys() and min(timed.values()) > 0 and rounds > 1
    cluster = parse_cluster("2xcpu")
    known = replace(cluster, device=replace(cluster.device, timed=dict.fromkeys(keys, 7.0)))
    assert {durations_of(program, known).duration(0, i) for i in wanted} == {7.0}


def test_what_cannot_be_predicted_is_refused() -> None:
    with pytest.raises(PlanError, match="8 ranks.*2 devices"):
        predict_job(job_of("mlp", 8, 1), plait.resolve("ddp", 8), parse_cluster("2xcpu"))
    uncapturable = next(name for name, case in ZOO.items() if not case.capturable)
    with pytest.raises(CaptureError):
        predict_job(job_of(uncapturable, 8, 1), plait.resolve("single", 1), parse_cluster("2xcpu"))


def test_complaint_02_a_plan_that_cannot_fit_is_refused_before_launch(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"does not fit: rank 0 needs .* of 100 KiB: parameters") as caught:
        plait.train(
            job_of("gpt", 8, 1), "ddp", 2, steps=1, out=tmp_path / "run", limits=plait.Limits(memory="100KiB")
        )
    assert caught.value.fix and not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="much"):
        memory_limit("cpu", "much")
    assert memory_limit("cpu", None) is None
