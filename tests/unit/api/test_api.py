"""What the command line can, Python can: small jobs through every function, values out, nothing printed."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import jobs
from tests.zoo import ZOO

import plait
from plait.api import auto, machine, predict
from plait.cluster.parse import parse_cluster
from plait.errors import CaptureError, PlanError, UsageError
from plait.run.measure.machine import processor_name
from plait.run.measure.predict import predict_job

CPUS = parse_cluster("2xcpu")


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it had been measured."""
    monkeypatch.setattr(auto, "this_machine", lambda device, tell: CPUS)
    monkeypatch.setattr(auto, "remember", lambda cluster: None)
    monkeypatch.setattr(predict, "this_machine", lambda device, tell: CPUS)
    monkeypatch.setattr(predict, "remember", lambda cluster: None)


def job() -> plait.Job:
    return ZOO["mlp"].job(batch=8, steps=2)


CALLS: dict[str, Callable[[Path], object]] = {
    "train": lambda out: plait.train(job(), "single", steps=1, out=out),
    "auto": lambda out: plait.train(job(), "auto", 1, steps=1, out=out),
    "verify": lambda out: plait.verify(job(), "ddp", steps=1, serial=True),
    "parallelize": lambda out: plait.parallelize(job(), "single"),
    "capture": lambda out: plait.capture(job()),
    "placements": lambda out: plait.placements(job(), "megatron", 2),
    "choose": lambda out: plait.choose(job(), cluster=CPUS),
    "scale": lambda out: plait.scale([1, 2], job(), cluster=CPUS),
    "predict": lambda out: plait.predict(job(), "ddp", cluster="2xA100"),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_printed_and_the_callers_generators_go_on(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seed() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)

    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.random())

    seed()
    wanted = draw()
    seed()
    CALLS[name](tmp_path / "run")
    assert draw() == wanted
    assert capsys.readouterr().out == ""


def test_capture_takes_a_reference_and_a_batch() -> None:
    graph = plait.capture(jobs.reference("plain"), batch=3)
    assert graph.num_samples == 3
    with pytest.raises(CaptureError, match="zoo.py"):
        plait.capture(ZOO["branching"].job())
    with pytest.raises(UsageError, match="--batch 0"):
        plait.capture(job(), batch=0)


def test_settings_change_the_job_and_the_plan() -> None:
    listing = plait.placements(
        job(), "ddp", changes=plait.Changes(settings={"batch": 6, "memory": {"zero": 1}})
    ).listing
    assert (dict(listing.axes), listing.num_samples, listing.zero) == ({"data": 2}, 6, 1)


def test_a_plan_without_ranks_is_predicted_on_the_whole_cluster() -> None:
    given = ZOO["mlp"].job(batch=64, num_samples=64)
    whole = plait.predict(given, "ddp", cluster="2x8xV100").prediction
    assert whole.plan.ranks == 16 and whole.batch == 64
    assert plait.predict(given, cluster="8xA100").prediction.plan.ranks == 8
    assert plait.predict(given, "ddp", 2, cluster="8xA100").prediction.plan.ranks == 2
    assert (
        plait.predict(
            given, "megatron", changes=plait.Changes(mesh={"tensor": 2}), cluster="8xA100"
        ).prediction.plan.ranks
        == 2
    )
    assert plait.predict(given, "single", cluster="8xA100").prediction.plan.ranks == 1
    assert plait.predict(given, plait.resolve("ddp", 4), cluster="8xA100").prediction.plan.ranks == 4


def test_parts_are_timed_for_a_cluster_that_was_measured_on_machines_like_this_one() -> None:
    hosts = replace(CPUS, name="measured", hosts=2)
    here = replace(hosts, device=replace(hosts.device, name=processor_name()))
    told: list[str] = []

    def listener(event: Mapping[str, Any]) -> None:
        told.append(str(event["stage"]))

    timed = plait.predict(job(), "local-sgd", 2, cluster=here, listener=listener)
    assert "timing the parts of a step" in told and timed.cluster.device.timed
    told.clear()
    assert not plait.predict(job(), "ddp", 2, cluster=hosts, listener=listener).cluster.device.timed
    assert told and "timing the parts of a step" not in told


def test_a_choice_says_what_it_takes(tmp_path: Path) -> None:
    small = plait.choose(job(), cluster=CPUS)
    assert small.plan is small.best.plan and small.best.cluster.size == 2
    alone = plait.choose(job(), cluster=CPUS, search=plait.Search(ranks=1))
    assert alone.to_use("a.yaml", "x.py").startswith(
        "plait run x.py --plan a.yaml --set batch=8 --set accumulate="
    )
    large = plait.choose(model="gpt:layers=4,hidden=64,heads=4,seq=32,vocab=64", batch=64, cluster="2x8xA100")
    assert "it needs 16 devices of 2x8xA100, and this machine has" in large.to_use("a.yaml")
    assert large.to_use("a.yaml", "x.py").startswith(
        "plait predict x.py --plan a.yaml --cluster 2x8xA100 --set"
    )
    assert "plait run" not in large.to_use("a.yaml", "x.py") + large.to_use("a.yaml")
    assert plait.resolve(_written(tmp_path / "plan.yaml", large.to_yaml()), None).ranks == 16
    assert large.why
    told = plait.export_plan(large, "fsdp2", tmp_path / "fsdp2.py")
    assert (tmp_path / "fsdp2.py").exists() and "for fsdp2" in told[0]
    with pytest.raises(UsageError, match="JOB or --model"):
        plait.choose(job(), model="gpt2")
    with pytest.raises(UsageError, match="belongs to a plan"):
        plait.choose(job(), cluster=CPUS, changes=plait.Changes(settings={"sync": {"bucket_mib": 1}}))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_auto_tells_what_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    real = predict_job

    def refusing(given: Any, plan: plait.Plan, *more: Any, **options: Any) -> Any:
        if plan.mesh.size_of("data") == 2:
            raise PlanError("it has two of them.")
        return real(given, plan, *more, **options)

    monkeypatch.setattr(auto, "predict_job", refusing)
    found = auto.choose_for_run(job(), "mlp", 2, "cpu", lambda stage: None)
    assert found.plan.mesh.size_of("data") == 1
    assert "Refused: " in found.told and "it has two of them" in found.told
    monkeypatch.setattr(auto, "predict_job", _never)
    with pytest.raises(PlanError, match="plans that look best can be used: .*never") as caught:
        auto.choose_for_run(job(), "mlp", 2, "cpu", lambda stage: None)
    assert caught.value.fix is not None and "--plan ddp" in caught.value.fix


@pytest.mark.parametrize(
    ("ranks", "name", "used"), [(None, "ddp", CPUS.size), (1, "single", 1), (2, "ddp", 2)]
)
def test_auto_of_a_model_that_cannot_be_captured_takes_a_plan_that_runs_it_as_it_is(
    ranks: int | None, name: str, used: int
) -> None:
    branching = ZOO["branching"].job(batch=8, steps=2)
    found = auto.choose_for_run(branching, "branching", ranks, "cpu", lambda stage: None)
    assert (found.plan.name, found.plan.ranks, found.job) == (name, used, branching)
    assert "cannot be captured" in found.told and "zoo.py" in found.told


def _never(*given: Any, **options: Any) -> Any:
    raise PlanError("never.")


def test_auto_is_a_plan_for_train(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    result = plait.train(
        job(), "auto", 1, steps=1, out=tmp_path / "run", watching=plait.Watching(listener=events.append)
    )
    assert len(result.losses) == 1
    assert any("plan auto: " in event.get("told", "") for event in events)
    with pytest.raises(UsageError, match="auto chooses the mesh"):
        plait.train(job(), "auto", changes=plait.Changes(mesh={"data": 2}), out=tmp_path / "other")


def test_a_run_of_a_named_job_is_resumed_by_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"seed": 3, "sync": {"bucket_mib": 2.0}}
    saving = plait.Saving(record_samples=True)
    plait.train(
        jobs.reference("plain"),
        "single",
        steps=2,
        out=out,
        changes=plait.Changes(settings=settings),
        saving=saving,
    )
    result = plait.resume(out, steps=4)
    assert len(result.losses) == 2
    record = plait.read_run(out)
    assert [line["step"] for line in record.metrics] == [0, 1, 2, 3]
    assert record.environment["seed"] == 3, "the settings were remembered"
    assert len((out / "samples.jsonl").read_text().splitlines()) == 4
    assert plait.export(out).name == "weights.safetensors"
    assert plait.write_page(out).exists()
    with pytest.raises(UsageError, match="--to 'x' is not known"):
        plait.export(out, to="x")  # type: ignore[arg-type]


def test_a_run_of_a_job_without_a_name_must_be_given_it(tmp_path: Path) -> None:
    plait.train(job(), "single", steps=1, out=tmp_path)
    with pytest.raises(UsageError, match="does not say which job it ran"):
        plait.resume(tmp_path)
    assert len(plait.resume(tmp_path, job=job(), steps=2).losses) == 1


def test_runs_and_predictions_side_by_side(tmp_path: Path) -> None:
    plait.train(job(), "single", steps=3, out=tmp_path / "one")
    predicted = plait.predict(job(), "ddp", cluster="2xA100").prediction
    found = plait.compare(tmp_path / "one", predicted)
    one, other = found.rows
    assert (one.plan, one.ranks, one.batch, one.num_steps, one.is_predicted) == ("single", 1, 8, 3, False)
    assert (other.plan, other.ranks, other.is_predicted) == ("ddp", 2, True)
    assert one.samples_per_s is not None and one.final_loss is not None
    assert found.speed(0) == 1.0
    assert found.speed(1) == pytest.approx(predicted.samples_per_s / one.samples_per_s)
    with pytest.raises(UsageError, match="nothing to compare"):
        plait.compare()


def test_measure_writes_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = plait.Measured(cluster=CPUS, notes={"notice": None})
    monkeypatch.setattr(machine, "measure_machine", lambda device, tell: measured)
    assert plait.measure(out=tmp_path / "here.yaml") is measured
    assert plait.choose(job(), cluster=str(tmp_path / "here.yaml")).best.cluster.size == 2
    with pytest.raises(UsageError, match="'tpu' is not known"):
        plait.measure("tpu")


def test_validate_gives_values(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("not json\n")
    found = plait.validate(path)
    assert len(found.bad_lines) == 1 and not found.outcomes
