"""Files are whole or not there, wherever people have them written."""

import os
import threading
from pathlib import Path

import pytest

from plait.errors import DiskError
from plait.files.write import write_named, write_whole


def test_what_a_person_names_is_written_through_a_link_into_a_pipe_or_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_named(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "one"
    os.mkfifo(tmp_path / "pipe")
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_named(tmp_path / "pipe", "two")
    reader.join(10)
    assert heard == ["two"]
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(DiskError, match="/dev/full cannot be written: No space left on device"):
        write_named(Path("/dev/full"), "three")
    assert Path("/dev/full").is_char_device()


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "plan.yaml", "old")

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match="it needs 3 B and .* is free"):
        write_named(tmp_path / "plan.yaml", "new")
    assert (tmp_path / "plan.yaml").read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_names_that_are_no_text_here_are_written_as_they_are(tmp_path: Path) -> None:
    write_whole(tmp_path / "page", "runs/r" + b"\xc3\xbcn".decode("ascii", "surrogateescape"))
    assert (tmp_path / "page").read_text("utf-8") == "runs/r\u00fcn"
