"""A run that is to go on, on hosts with disks of their own: what any of them has of it comes to the first."""

import json
import multiprocessing
import os
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plait.errors import EchoError, PlaitError, UsageError
from plait.files.unused import COPY_NAME
from plait.run.checkpoint.state import OptimizerState, TrainingState
from plait.run.checkpoint.store import load_checkpoint, save_checkpoint
from plait.run.join.place import Place
from plait.run.parent.found import find_run
from plait.run.start import party as parties
from plait.run.start.party import join, telling, told_once
from plait.run.start.tasks import follower, members
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower

RUN = Path("run")

pytestmark = pytest.mark.timeout(60)


def _write(host: Path, *steps: int, run: str | None = "r", records: bool = False, copy: bool = False) -> None:
    """What a host has of a run."""
    folder = host / RUN / COPY_NAME if copy else host / RUN
    folder.mkdir(parents=True)
    if run is not None:
        (folder / "environment.json").write_text(json.dumps({"run": run, "first_step": 0, "job": "job.py"}))
        (folder / "plan.yaml").write_text("name: ddp\n")
    if records:
        (folder / "metrics.jsonl").write_text("records\n")
    for step in steps:
        nothing = OptimizerState(groups=[], tensors={}, values={})
        state = TrainingState(
            step=step, parameters={"w": torch.tensor([step])}, buffers={}, aliases={}, optimizer=nothing
        )
        save_checkpoint(folder / "checkpoints", state)


def _on_two_hosts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: Callable[[First], None],
    other: Callable[[Follower], None],
    others: int = 2,
) -> None:
    """Each in its own folder, as if that were its disk; the second, one of so many, must come to its end too."""
    monkeypatch.setenv("PLAIT_TOKEN", uuid.uuid4().hex)
    places = [
        Place(engine="test", task=task, tasks=tasks, local_tasks=tasks, first="127.0.0.1", run=str(tmp_path))
        for task, tasks in ((0, 2), (1, others))
    ]

    def follow() -> None:
        os.chdir(tmp_path / "other")
        try:
            met = join(places[1], None)
            assert isinstance(met, Follower)
            other(met)
        except BaseException as error:
            if others != 2 and isinstance(error, EchoError):
                os._exit(0)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    for name in ("first", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=follow)
    process.start()
    monkeypatch.chdir(tmp_path / "first")
    try:
        met = join(places[0], None)
        assert isinstance(met, First)
        first(met)
        met.close()  # as when its process ends, for which others wait
        process.join(30)
        assert process.exitcode == 0
    finally:
        if os.getpid() in parties._joined:
            parties._joined.pop(os.getpid()).close()
        else:  # the tasks have not met
            process.join(30)
            assert process.exitcode == 0
        process.kill()
        process.join()


def _found_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool = True
) -> tuple[dict[str, str] | None, list[str]]:
    """What task 0 finds, and what it says of it."""
    found: list[dict[str, str] | None] = []
    said: list[str] = []

    def first(party: First) -> None:
        found.append(find_run(RUN, party, lambda event: said.append(event["notice"]), is_kept=is_kept))

    def other(party: Follower) -> None:
        told = find_run(RUN, party, lambda event: None, is_kept=is_kept)
        (tmp_path / "told").write_text(json.dumps(told))

    _on_two_hosts(tmp_path, monkeypatch, first, other)
    assert json.loads((tmp_path / "told").read_text()) == found[0]
    return found[0], said


def test_the_first_host_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "first", 10, records=True)
    found, said = _found_by_both(tmp_path, monkeypatch)
    assert found is not None and '"job": "job.py"' in found["environment.json"] and not said


def test_a_host_that_was_the_first_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "other", 10, 20, records=True)
    found, said = _found_by_both(tmp_path, monkeypatch)
    assert found is not None and len(said) == 2 and "task 1 on " in said[0]
    assert (tmp_path / "first/run/metrics.jsonl").read_text() == "records\n"
    assert load_checkpoint(tmp_path / "first/run").step == 20
    assert not (tmp_path / "first/run" / COPY_NAME).exists()


def test_a_copy_is_newer_than_what_the_first_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though fewer checkpoints were written where it is."""
    _write(tmp_path / "first", 1, 2, 3, records=True)
    _write(tmp_path / "other", 25, copy=True)
    found, said = _found_by_both(tmp_path, monkeypatch)
    assert found is not None and "step 25" in said[0]
    assert load_checkpoint(tmp_path / "first/run").step == 25


def test_the_first_has_a_copy_and_the_other_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "first", 20, copy=True)
    _write(tmp_path / "other", 10, records=True)
    found, _ = _found_by_both(tmp_path, monkeypatch)
    assert found is not None and (tmp_path / "first/run/metrics.jsonl").read_text() == "records\n"
    assert load_checkpoint(tmp_path / "first/run").step == 20


def test_a_copy_alone_is_a_run_whose_records_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 20, copy=True)
    monkeypatch.chdir(tmp_path)
    assert find_run(RUN, None, lambda event: None, is_kept=True) is not None
    assert load_checkpoint(RUN).step == 20
    assert "first_step" not in json.loads((RUN / "environment.json").read_text())


def test_a_copy_of_nothing_is_not_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, copy=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="saved on hosts that are not here: this host took part"):
        find_run(RUN, None, lambda event: None, is_kept=True)


def test_nobody_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found_by_both(tmp_path, monkeypatch) == (None, [])


@pytest.mark.parametrize(
    ("has", "refused"),
    [
        ({"run": "s", "records": True}, "has another run in run"),
        ({"copy": True}, "was saved on hosts that are not here"),
    ],
)
def test_what_is_refused(
    has: dict[str, object], refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the same name on another host is not taken for this one; what is lost is not begun anew."""
    if "run" in has:
        _write(tmp_path / "first", 10, records=True)
    _write(tmp_path / "other", **has)  # type: ignore[arg-type]

    def first(party: First) -> None:
        with pytest.raises(UsageError, match=refused), telling(party):
            find_run(RUN, party, lambda event: None, is_kept=True)

    def other(party: Follower) -> None:
        with pytest.raises(EchoError):
            find_run(RUN, party, lambda event: None, is_kept=True)

    _on_two_hosts(tmp_path, monkeypatch, first, other)


@pytest.mark.parametrize("asks", [0, 1])
def test_one_begins_and_the_other_wants_to_go_on(
    asks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(party: First) -> None:
        with pytest.raises(UsageError, match="looks for the run in run to go on with it"), telling(party):
            _look(party) if asks == 0 else party.begin({}, patience_s=30)

    def other(party: Follower) -> None:
        with pytest.raises(EchoError):
            _look(party) if asks == 1 else party.begin({})

    _on_two_hosts(tmp_path, monkeypatch, first, other)


def _look(party: First | Follower) -> None:
    find_run(RUN, party, lambda event: None, is_kept=True)


@pytest.mark.parametrize("wrong", [{0}, {1}, {0, 1}])
def test_what_is_wrong_before_tasks_begin_is_told_by_the_first(
    wrong: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(task: int, party: First | Follower) -> None:
        with told_once():
            if task in wrong:
                raise UsageError("there is no job.py.")
            with telling(party):
                party.begin({}, patience_s=30) if isinstance(party, First) else party.begin({})

    def first(party: First) -> None:
        with pytest.raises(PlaitError, match="^there is no" if 0 in wrong else r"^task 1 on .*: there is no"):
            begin(0, party)

    def other(party: Follower) -> None:
        with pytest.raises(EchoError):
            begin(1, party)

    _on_two_hosts(tmp_path, monkeypatch, first, other)


def test_tasks_of_runs_of_different_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which differ for longer than what is left of an earlier start would."""
    monkeypatch.setattr(members, "DIFFERS_S", 0.2)
    monkeypatch.setattr(follower, "DIFFERS_S", 0.2)
    monkeypatch.setattr(follower, "_TELLS_S", 0.5)
    nobody: list[First | Follower] = []
    with pytest.raises(UsageError, match=r"task 1 on .* was started with 3 tasks, task 0 with 2\."):
        _on_two_hosts(tmp_path, monkeypatch, nobody.append, nobody.append, others=3)
    assert not nobody
