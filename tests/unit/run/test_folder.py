"""The run folder: its name, what is refused, and files that survive a torn end."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.run.loop.folder import LineFile, discard_if_empty, make_run_folder, write_environment


def test_names_do_not_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:  # runs started in the same second
        made = list(pool.map(lambda _: make_run_folder(None, "mlp", resuming=False), range(8)))
    assert len(set(made)) == 8
    assert all((folder / "checkpoints").is_dir() and folder.parent == Path("runs") for folder in made)
    assert all(folder.name.startswith("mlp-") for folder in made)


def test_a_run_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "a" / "b", "mlp", resuming=False)
    assert make_run_folder(folder, "mlp", resuming=False) == folder  # nothing was run there yet
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UsageError, match="already holds a run"):
        make_run_folder(folder, "mlp", resuming=False)
    assert make_run_folder(folder, "mlp", resuming=True) == folder


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made: Not a directory"):
        make_run_folder(tmp_path / "file" / "run", "mlp", resuming=False)


def test_only_an_empty_folder_is_taken_back(tmp_path: Path) -> None:
    empty = make_run_folder(tmp_path / "empty", "mlp", resuming=False)
    used = make_run_folder(tmp_path / "used", "mlp", resuming=False)
    (used / "checkpoints" / "step-00000001").mkdir()
    discard_if_empty(empty)
    discard_if_empty(used)
    assert not empty.exists()
    assert (used / "checkpoints" / "step-00000001").is_dir()


def test_the_environment_is_written_with_what_is_given(tmp_path: Path) -> None:
    write_environment(tmp_path, {"ranks": 3, "job": Path("x.py")})
    content = json.loads((tmp_path / "environment.json").read_text())
    assert (content["ranks"], content["job"]) == (3, "x.py")
    assert {"plait", "python", "torch", "platform", "cpus", "started"} <= set(content)


def test_lines_are_kept_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with LineFile(path) as file:
        for step in range(4):
            file.write({"step": step})
    with path.open("a") as torn:
        torn.write('{"step": 4, "lo')  # killed in the middle of a line
    with LineFile(path, keep_below=2) as file:
        file.write({"step": 2, "again": True})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0},
        {"step": 1},
        {"step": 2, "again": True},
    ]


def test_flushed_lines_are_there_before_the_end(tmp_path: Path) -> None:
    with LineFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 0})
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        file.flush()
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0}
