"""More of the gallery: numbers that the simulator, the serial interpreter or counting gives without a clock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import sparse_verses
from examples.lectures import lecture000_folds as folds
from examples.lectures import lecture000_gpt3_days as gpt3
from examples.lectures import lecture000_naive_then_pipelined as naive
from examples.lectures import lecture001_bucket_sizes as bucket_sizes
from examples.lectures import lecture001_latency_breakdown as latency
from examples.lectures import lecture001_pipedream as pipedream
from examples.lectures import lecture001_round_robin as round_robin
from examples.lectures import lecture002_backends as backends
from examples.lectures import lecture002_batch_sizes as batch_sizes
from examples.lectures import lecture002_srun as srun
from examples.lectures import lecture003_alpa as alpa
from examples.lectures import lecture003_inter_and_intra as inter_and_intra
from examples.lectures import lecture004_deepspeed as deepspeed
from examples.lectures import lecture004_locked_async_hogwild as locked
from examples.lectures import lecture004_pipelines as pipelines
from examples.lectures import lecture004_server_bottleneck as bottleneck
from examples.lectures.exhibit import Exhibit
from examples.lectures.runs import trained
from examples.lectures.slurm import NoSlurmError

import plait
from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.plan.named import resolve
from plait.report.breakdown import RankBreakdown, breakdown
from plait.run.measure.links.backend_table import OPERATIONS
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import run_serially


def predicted(job: plait.Job, plan: str) -> list[RankBreakdown]:
    return list(breakdown(plait.predict(job, plan, 2, cluster="2xV100").trace))


def waiting(parts: list[RankBreakdown]) -> float:
    """Of the time in which a device could compute."""
    idle = sum(part.idle_s + part.exposed_communication_s for part in parts)
    return idle / (idle + sum(part.forward_s + part.backward_s for part in parts))


def of_tables(exhibit: Exhibit) -> dict[str, list[Any]]:
    return {str(row[0]): list(row[1:]) for row in exhibit.tables[0].rows}


def test_one_batch_leaves_half_of_two_devices_idle_and_micro_batches_much_less() -> None:
    found = {
        plan: waiting(predicted(naive.job(count), plan))
        for plan, count in (("naive", 1), ("gpipe", 8), ("1f1b", 8))
    }
    assert found["naive"] == pytest.approx(1 / 2, abs=0.05)
    assert 1 / 9 < found["gpipe"] < 0.3, "the bubble, and a last stage that has one more layer"
    assert found["1f1b"] == pytest.approx(found["gpipe"], abs=0.01)


def test_cut_operators_send_more_and_wait_less() -> None:
    inter, intra = (predicted(inter_and_intra.job(), plan) for plan in ("naive", "megatron"))
    sent = [sum(part.communicated_bytes for part in parts) / len(parts) for parts in (inter, intra)]
    assert sent[1] > 2 * sent[0]
    assert waiting(inter) > 0.4 > 4 * waiting(intra)


def test_one_server_stops_scaling() -> None:
    alone = bottleneck.rate("ddp", 1, 1)
    one, four = (bottleneck.rate("server-sync", 8 + servers, 8, servers) for servers in (1, 4))
    assert one < 1.5 * alone < 3 * alone < four < bottleneck.rate("ddp", 8, 8) < 8 * alone


def test_stages_and_the_host_let_larger_models_fit() -> None:
    made = deepspeed.exhibit()
    rows = of_tables(made)
    fit = {
        name: [size for size, row in rows.items() if "too" not in row[at]]
        for at, name in enumerate(deepspeed.PLANS)
    }
    assert [len(fit[name]) for name in ("ddp", "zero1", "zero2", "zero3")] == [1, 2, 3, 4]
    assert len(fit["ddp, host"]) > len(fit["ddp"])
    assert made.numbers[-1].ours == pytest.approx(8.0)


def test_overlap_hides_part_of_the_sums_of_resnet_on_32_gpus() -> None:
    without, beside = (latency.predicted("ResNet", overlap=overlap) for overlap in (False, True))
    assert beside["exposed communication"] < 0.75 * without["exposed communication"]
    for part in ("forward", "backward", "update"):
        assert beside[part] == pytest.approx(without[part], rel=0.01)
    assert sum(beside.values()) < sum(without.values())


def test_a_bucket_has_a_tensor_or_all() -> None:
    job, counts = bucket_sizes.job(), {}
    for size in bucket_sizes.SIZES:
        plan = resolve("ddp", 2, {"sync": {"bucket_mib": size}})
        program = prepare(job, plan, "cpu", torch.float32, lambda event: None).full_step()
        counts[size] = len([bucket for bucket in program.classes[0].buckets if bucket.parameters])
    assert counts[0.0] == 2 * (bucket_sizes.LAYERS + 1) and counts[64.0] <= 2  # the first is small
    assert sorted(counts.values(), reverse=True) == list(counts.values())


def test_pipedream_takes_another_path_and_1f1b_does_not() -> None:
    job = replace(pipedream.job(), epochs=None, steps=4, evaluate=None, metrics={})
    one, exact, stale = (
        run_serially(job, resolve(plan, ranks), 4, torch.float64).losses
        for plan, ranks in (("single", 1), ("1f1b", 2), ("pipedream", 2))
    )
    assert exact == pytest.approx(one, rel=1e-9)
    assert abs(stale[-1] - one[-1]) > 1e-3


def test_every_cell_of_nccls_column_is_on_record() -> None:
    record = json.loads(backends.RECORDED.read_text())
    assert set(record["works"]["nccl"]) == set(OPERATIONS) and all(record["works"]["nccl"].values())
    assert record["where"] and record["when"]
    assert all(set(ticked) <= set(OPERATIONS) for ticked in backends.LECTURE.values())


def test_one_step_an_epoch_hardly_moves() -> None:
    found = {}
    for name in ("mini-batch, B = 64", "batch, B = all"):
        batch, shuffle, lr = batch_sizes.VARIANTS[name]
        with trained(
            batch_sizes.job(batch, shuffle=shuffle, lr=lr), "single", saving=plait.Saving(trace=False)
        ) as result:
            found[name] = (len(result.losses), result.evaluation["accuracy"])
    (many, learned), (few, not_yet) = found.values()
    assert (many, few) == (69, 3)
    assert learned > 0.8 > not_yet


def test_without_slurm_the_exhibit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nowhere(*_: Any) -> Iterator[None]:
        raise NoSlurmError("there is no slurmctld here")
        yield

    monkeypatch.setattr(srun, "two_nodes", nowhere)
    assert "no slurmctld" in str(srun.exhibit().numbers[0].ours)


def test_alpas_choice_keeps_cut_operators_within_a_host() -> None:
    slow = alpa.best(alpa.SLOW)
    assert dict(slow.plan.mesh.axes).get("tensor", 1) <= 4


def test_the_lecture_extrapolates_147_days(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of 30.8 s, 300 billion tokens take 34 days, as published."""
    best = SimpleNamespace(step_s=30.8, utilization=0.5, plan=resolve("ddp", 2))
    monkeypatch.setattr(plait, "choose", lambda **_: SimpleNamespace(best=best))
    larger, minutes, days, predicted_days = (float(number.ours) for number in gpt3.exhibit().numbers)
    assert (round(larger), round(minutes / 1000), round(days)) == (530, 212, 147)
    assert predicted_days == pytest.approx(gpt3.PUBLISHED_DAYS, rel=0.01)


def test_the_best_rate_is_found_over_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "RATES", (0.001, 0.1))
    monkeypatch.setattr(folds, "FOLDS", 2)
    monkeypatch.setattr(folds, "STEPS", 30)
    made = folds.exhibit()
    runs, best, accuracy = (number.ours for number in made.numbers)
    assert (runs, best) == (4.0, 0.1)
    assert isinstance(accuracy, float) and accuracy > 0.6


def test_several_groups_pay_where_latency_decides() -> None:
    """By prediction: one bucket's latency passes while another is sent; bytes stay what they are."""

    def gain(network: str) -> float:
        emulation = plait.Trial(emulate=network).emulation
        assert emulation is not None
        cluster = emulated(parse_cluster("2xV100"), emulation)
        one, five = (
            plait.predict(
                bucket_sizes.job(),
                "ddp",
                changes=plait.Changes(settings=round_robin.settings(groups)),
                cluster=cluster,
            ).prediction.step_s
            for groups in (1, 5)
        )
        return one / five

    latency, bandwidth = (gain(network) for network in round_robin.NETWORKS)
    assert latency > 2 > 1.3 > bandwidth > 1


def test_bubbles_are_the_lectures() -> None:
    made = pipelines.exhibit()
    assert len(made.numbers) == 3 and set(made.pictures) and len(made.pictures) == len(pipelines.SHOWN)
    for number in made.numbers:
        assert number.ours == pytest.approx(number.lecture, abs=1e-9), number.what


def test_who_waits_computes_what_one_process_does_and_who_does_not_still_learns() -> None:
    job = replace(sparse_verses.job(), epochs=None, steps=40, evaluate=None, metrics={})
    found = {
        plan: run_serially(job, resolve(plan, ranks), 40, torch.float32).losses
        for plan, (_, ranks) in locked.PLANS.items()
    }
    one = run_serially(job, resolve("single", 1), 40, torch.float32).losses
    assert found["server-sync"] == pytest.approx(one, rel=1e-4)
    for plan in ("server-async", "hogwild"):
        assert len(found[plan]) >= 40 and sum(found[plan][-10:]) < 0.95 * sum(found[plan][:10])
