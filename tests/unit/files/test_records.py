"""Records are appended, checked by their sums, and dropped in one rename."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from plait.errors import DiskError
from plait.files import records
from plait.files.records import RecordFile, opened, read_records, sealed
from plait.files.write import write_whole


def below(step: int) -> Any:
    return lambda entry: entry["step"] < step


def test_a_record_comes_back_and_a_changed_one_is_found() -> None:
    line = sealed({"step": 3, "loss": 0.1, "name": 'x", "sum": "00000000"}'}).rstrip("\n")
    assert opened(line) == {"step": 3, "loss": 0.1, "name": 'x", "sum": "00000000"}'}
    assert json.loads(line)["step"] == 3  # any reader of JSON lines takes it
    with pytest.raises(ValueError, match="was changed"):
        opened(line.replace("0.1", "0.2"))
    assert opened('{"step": 1}') == {"step": 1}  # of an older run


def test_steps_that_are_done_again_and_torn_lines_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RecordFile(path) as file:
        for step in range(4):
            file.write({"step": step})
    with path.open("a") as torn:
        torn.write('{"step": 4, "lo')  # killed in the middle of a line
    with RecordFile(path, keep=below(2)) as file:
        file.write({"step": 2, "again": True})
    assert read_records(path).entries == ({"step": 0}, {"step": 1}, {"step": 2, "again": True})
    assert read_records(path).problems == ()


def test_a_line_that_lacks_only_its_end_is_not_run_into(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(sealed({"step": 0}).rstrip("\n"))
    with RecordFile(path, keep=below(9)) as file:
        file.write({"step": 1})
    assert read_records(path).entries == ({"step": 0}, {"step": 1})


def test_resuming_on_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with RecordFile(path) as file:
        for step in range(100):
            file.write({"step": step})
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="No space"):
        RecordFile(path, keep=below(50))
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_needs_no_change_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write_whole(path, sealed({"step": 0}))
    monkeypatch.setattr(records, "write_whole", None)
    RecordFile(path, keep=below(1)).close()
    assert read_records(path).entries == ({"step": 0},)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\xff\xfe\n[1]\n' + b"[" * 5000 + b"\n\n" + sealed({"step": 1}).encode())
    found = read_records(path)
    assert found.entries == ({"step": 0}, {"step": 1})
    assert [number for number, _ in found.problems] == [2, 3, 4]


def test_flushed_lines_are_there_before_the_end(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 0})
        assert (tmp_path / "metrics.jsonl").read_text() == ""
        file.flush()
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 0


def test_a_file_that_was_removed_meanwhile_is_told(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "metrics.jsonl")
    file.write({"step": 0})
    file.flush()
    (tmp_path / "metrics.jsonl").unlink()
    file.write({"step": 1})
    with pytest.raises(DiskError, match="metrics.jsonl cannot be written: it was removed meanwhile"):
        file.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_room_is_told_of_where_it_is_what_lacks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RecordFile(tmp_path / "metrics.jsonl")
    file.write({"step": 0})

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr("plait.files.records.os.write", refuse)
        with pytest.raises(DiskError) as told:
            file.close()
    assert os.strerror(number) in told.value.what
    assert ("is free" in told.value.what) == (number == errno.ENOSPC)
    assert ("free space" in (told.value.fix or "")) == (number == errno.ENOSPC)
