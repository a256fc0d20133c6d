"""Scratch folders: gone with who made them, and those of killed ones with the next."""

import os
import tempfile
from pathlib import Path

import pytest

from plait.files.scratch import remove_abandoned, scratch_folder


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young, other = (tmp_path / name for name in ("plait-scratch-a", "plait-scratch-b", "mine"))
    for folder in (left, young, other):
        (folder / "run").mkdir(parents=True)
    for folder in (left, other):
        os.utime(folder, (0, 0))
    with scratch_folder() as living:
        os.utime(living, (0, 0))
        remove_abandoned(tmp_path)
        assert living.is_dir()
        assert not left.exists()
        assert young.is_dir()
        assert other.is_dir()
    assert not living.exists()
