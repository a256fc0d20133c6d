"""The run folder: its name, what is refused, and files that survive a torn end."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.unit.run.checkpoint.checkpoint_states import small_state

from plait.errors import CheckpointError, DiskError, UsageError
from plait.files.records import RecordFile, read_records
from plait.run.checkpoint.store import save_checkpoint
from plait.run.record.folder import discard_if_empty, make_run_folder, write_environment
from plait.run.record.last_words import room_for_last_words
from plait.run.record.lock import locked
from plait.run.record.shares import ShareLog


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


def test_a_folder_has_one_writer_and_says_who(tmp_path: Path) -> None:
    with locked(tmp_path):
        told = rf"process {os.getpid()} on .*, since 20"
        with pytest.raises(UsageError, match=told), locked(tmp_path):
            raise AssertionError("two writers")
    with locked(tmp_path):  # it was given back
        pass


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o600), (0o002, 0o660), (0o077, 0o600)])
def test_who_may_not_write_to_a_folder_cannot_lock_it(umask: int, mode: int, tmp_path: Path) -> None:
    """Whoever can read a file can lock it."""
    before = os.umask(umask)
    try:
        with locked(tmp_path):
            assert (tmp_path / "run.lock").stat().st_mode & 0o777 == mode
        (tmp_path / "run.lock").chmod(0o666 & ~umask)  # as older ones are
        with locked(tmp_path):
            assert (tmp_path / "run.lock").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_the_lock_of_a_dead_holder_is_taken_over(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from plait.run.record.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {holder.pid} on "), locked(tmp_path):
            raise AssertionError("two writers")
    finally:
        holder.kill()
        holder.communicate()
    with locked(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_an_unreadable_lock_still_locks(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / "run.lock").write_bytes(b"\xff" * 10)
        with pytest.raises(UsageError, match="by another run"), locked(tmp_path):
            raise AssertionError("two writers")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match=r"is no run folder: it holds thesis\.tex") as caught:
        make_run_folder(tmp_path, "mlp", resuming=False)
    assert str(tmp_path / "run") in str(caught.value.fix)
    assert make_run_folder(tmp_path / "run", "mlp", resuming=False) == tmp_path / "run"


@pytest.mark.parametrize("name", ["run.lock", ".reserve", "metrics.jsonl", "shares.jsonl"])
def test_a_folder_that_was_handed_over_is_no_way_to_other_files(name: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "run"
    secret.write_text("precious")
    folder.mkdir()

    def writes() -> None:
        with locked(folder), room_for_last_words(folder):
            RecordFile(folder / "metrics.jsonl").close()
            ShareLog(folder, 0).close()

    (folder / name).symlink_to(secret)
    with (
        suppress(UsageError, DiskError)
        if name == ".reserve"
        else pytest.raises((UsageError, DiskError), match=f"{name}.* a link to .*secret")
    ):
        writes()
    assert secret.read_text() == "precious"
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)  # and none that waits for ever
    with suppress(UsageError, DiskError):
        writes()
    if name == "metrics.jsonl":
        with pytest.raises(OSError, match="no ordinary file"):
            read_records(folder / name)


def test_a_disk_without_room_for_the_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, text: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskError, match=r"run\.lock") as caught, locked(tmp_path):
        pass
    assert caught.value.fix


def test_a_disk_that_turns_read_only_at_the_very_end_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with locked(tmp_path):
        monkeypatch.setattr(os, "ftruncate", refuse)
    monkeypatch.undo()
    with locked(tmp_path):
        pass


def test_of_a_killed_holder_the_ranks_that_still_end_are_waited_for(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from plait.run.record.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n"
        "    if os.fork(): print('held', flush=True); time.sleep(60)\n"
        "    else: time.sleep(1.0); os._exit(0)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with locked(tmp_path):  # nobody has asked for it yet: it is dead all the same
        pass
    holder.communicate()


def test_a_checkpoint_that_cannot_be_gone_on_from_is_not_recommended(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "checkpoints", small_state(4))
    with pytest.raises(CheckpointError) as caught, room_for_last_words(tmp_path):
        raise CheckpointError(f"{folder}: it is spoiled")
    assert caught.value.what == f"{folder}: it is spoiled."
    with pytest.raises(CheckpointError, match="Saved is step-00000004"), room_for_last_words(tmp_path):
        raise CheckpointError("the checkpoint of step 9 cannot be written")
