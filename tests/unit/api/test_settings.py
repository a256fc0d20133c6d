"""`--set` entries and what a run folder remembers."""

import json
from pathlib import Path

import pytest
from tests.zoo import ZOO

import plait
from plait.api.inputs.given import given_job, job_with
from plait.api.inputs.settings import merged, parse_settings, split_settings, write_settings
from plait.api.inputs.stored import stored_settings
from plait.errors import JobError, UsageError


def test_entries_go_to_the_job_or_to_the_plan() -> None:
    entries = ["batch=32", "clip_norm=0.5", "shuffle=false", "sync.bucket_mib=4", "sync.overlap=no"]
    job, plan = split_settings(parse_settings(entries))
    assert job == {"batch": 32, "clip_norm": 0.5, "shuffle": False}
    assert plan == {"sync": {"bucket_mib": 4, "overlap": False}}


def test_the_last_entry_wins() -> None:
    assert parse_settings(["batch=1", "batch=2"]) == {"batch": 2}


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("batch", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("model=3", "no such setting"),
        ("batch={", "is not YAML"),
    ],
)
def test_what_cannot_be_understood_is_refused(entry: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        parse_settings([entry])
    assert caught.value.fix


def test_settings_can_be_written_and_read() -> None:
    settings = {
        "batch": 32,
        "clip_norm": None,
        "sync": {"bucket_mib": 4.5, "overlap": False},
        "compile": "on",
    }
    assert parse_settings(write_settings(settings)) == settings
    assert split_settings(settings)[1] == {"sync": settings["sync"], "compile": "on"}


def test_of_two_settings_the_second_wins() -> None:
    first, second = {"batch": 8, "sync": {"overlap": False}}, {"batch": 9, "sync": {"bucket_mib": 2}}
    assert merged(first, second) == {"batch": 9, "sync": {"overlap": False, "bucket_mib": 2}}


def test_a_mapping_is_checked_like_entries() -> None:
    job, plan = given_job(ZOO["mlp"].job(), plait.Changes(settings={"batch": 3, "sync": {"bucket_mib": 2}}))
    assert job.batch == 3 and plan == {"sync": {"bucket_mib": 2}}
    with pytest.raises(UsageError, match="no setting 'model'"):
        given_job(ZOO["mlp"].job(), plait.Changes(settings={"model": 3}))
    with pytest.raises(JobError, match="not method"):
        given_job(ZOO["mlp"].job)  # type: ignore[arg-type]


def test_steps_and_epochs_replace_each_other() -> None:
    job = ZOO["mlp"].job(steps=3)
    assert (job_with(job, {"epochs": 2}).epochs, job_with(job, {"epochs": 2}).steps) == (2, None)
    assert job_with(job_with(job, {"epochs": 2}), {"steps": 5}).steps == 5
    assert job_with(job, {}) is job
    with pytest.raises(JobError, match="both epochs=1 and steps=1"):
        job_with(job, {"epochs": 1, "steps": 1})


def test_a_run_remembers_how_it_was_started(tmp_path: Path) -> None:
    environment = {"job": "x.py", "settings": ["batch=4"], "steps": None, "torch": "2", "checkpoint_every": 5}
    (tmp_path / "environment.json").write_text(json.dumps(environment))
    (tmp_path / "plan.yaml").write_text("plan: ddp\nmesh: {data: 3}\n")
    stored = stored_settings(tmp_path)
    assert stored == {
        "job": "x.py",
        "settings": ["batch=4"],
        "checkpoint_every": 5,
        "plan_file": tmp_path / "plan.yaml",
        "plan": "ddp",
    }


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert stored_settings(tmp_path) == {}
    with pytest.raises(UsageError, match="there is no run folder"):
        stored_settings(tmp_path / "missing")
    (tmp_path / "environment.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        stored_settings(tmp_path)
