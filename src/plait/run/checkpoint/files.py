"""Folders that are written whole or not at all.

In: a parent folder, a step and a function that writes files. Out: `<parent>/step-<step>/` with a manifest of sizes and
SHA-256 sums, visible under its name only once everything in it is on the disk. It knows nothing of tensors, and never
reads a file that is not one of the expected names.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import msgspec

from plait.errors import CheckpointError
from plait.files.document import Format
from plait.files.holder import is_alive
from plait.files.shape import read_json
from plait.files.write import ordinary

MANIFEST = "complete.json"
_TEMPORARY = re.compile(r"\.saving-([0-9]{1,9})-[0-9a-f]+")
_STEP = re.compile(r"step-([0-9]{8,18})(?:\.([0-9]{1,9}))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompleteFolder:
    """A folder whose manifest is readable and whose files have the sizes in it."""

    path: Path
    """Where it is."""
    sequence: int
    """The order of writing in its parent: the newest has the largest."""
    sums: dict[str, str]
    """File name -> SHA-256 in hex."""


def write_folder(parent: Path, step: int, files: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Let `write` fill a temporary folder with `files`, then make it `<parent>/step-<step>` in one rename.

    A kill at any moment leaves either no such folder or the whole of it. One process at a time writes to a parent.
    A step that is already there is not overwritten: the new folder is called `step-<step>.1`, and so on.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent)
    temporary = parent / f".saving-{os.getpid()}-{uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        write(temporary)
        sequence = 1 + max((folder.sequence for folder in complete_folders(parent, files)), default=0)
        _write_manifest(temporary, sequence, files)
        sync(temporary)
        target = _free_name(parent, step)
        temporary.rename(target)
        sync(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def complete_folders(parent: Path, files: Sequence[str]) -> list[CompleteFolder]:
    """The complete folders in `parent`, newest first; anything else in it is passed over."""
    found = []
    for path in parent.iterdir():
        if _STEP.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(CheckpointError):
                found.append(read_manifest(path, files))
    return sorted(found, key=lambda folder: (folder.sequence, folder.path.name), reverse=True)


def step_folders(parent: Path) -> list[Path]:
    """Every folder in `parent` that is named like a checkpoint, complete or not, in the order of their steps."""
    found = [path for path in parent.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: _step_and_revision(path.name))


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's folder name, or None where it is not named like one."""
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


class _File(msgspec.Struct):
    bytes: int
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Manifest(msgspec.Struct):
    sequence: int
    files: dict[str, _File]


FORMAT = Format(
    noun="a checkpoint's file", error=CheckpointError, fix="take another checkpoint.", max_bytes=1 << 30
)


def read_manifest(path: Path, files: Sequence[str]) -> CompleteFolder:
    """The folder's manifest, checked for shape and for the size of each of `files`; raises where it is not complete."""
    manifest = read_json(path / MANIFEST, _Manifest, FORMAT)
    if set(manifest.files) != set(files):
        raise CheckpointError(f"{path / MANIFEST} does not list exactly {', '.join(sorted(files))}")
    for name in files:
        expected = manifest.files[name].bytes
        try:
            size = (path / name).stat().st_size
        except OSError:
            size = 0
        if size != expected:
            raise CheckpointError(f"{path / name} is torn: {size} bytes of {expected}")
    sums = {name: manifest.files[name].sha256 for name in files}
    return CompleteFolder(path=path, sequence=manifest.sequence, sums=sums)


def check_sums(folder: CompleteFolder) -> None:
    """Read every file and compare its SHA-256 sum; raises at the first that differs."""
    for name, expected in folder.sums.items():
        try:
            actual = _sha256(folder.path / name)
        except OSError as error:  # as where a run that goes on deletes it meanwhile
            raise CheckpointError(f"{folder.path / name} cannot be read: {error.strerror}") from error
        if actual != expected:
            raise CheckpointError(
                f"{folder.path / name} is damaged: its SHA-256 is {actual[:12]}, written was {expected[:12]}"
            )


def prune_folders(
    parent: Path, files: Sequence[str], *, keep: int, newest: Path, best_step: int | None = None
) -> list[str]:
    """Delete all but the `keep` newest complete folders and that of `best_step`, and incomplete ones of earlier steps
    than `newest`; returns the names of complete ones that are gone."""
    complete = [folder.path for folder in complete_folders(parent, files)]
    deleted = []
    for path in complete[keep:]:
        if path != newest and step_of(path) != best_step:
            _remove(path)
            deleted.append(path.name)
    for path in step_folders(parent):
        if path not in complete and _step_and_revision(path.name) < _step_and_revision(newest.name):
            _remove(path)
    return deleted


def remove_abandoned(parent: Path) -> None:
    """Delete temporary folders of processes that are gone."""
    for path in parent.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until what was written to a file, or to a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_records(folder: Path) -> None:
    """Wait until the records of a run folder are on the disk: of the steps that led to a checkpoint none is missing."""
    for path in folder.glob("*.jsonl"):
        with suppress(OSError), open(path, opener=ordinary) as file:
            os.fsync(file.fileno())
    with suppress(OSError):
        sync(folder)


def _write_manifest(folder: Path, sequence: int, files: Sequence[str]) -> None:
    entries = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in files
    }
    text = json.dumps({"sequence": sequence, "files": entries}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")
    sync(folder / MANIFEST)


def _free_name(parent: Path, step: int) -> Path:
    target, revision = parent / f"step-{step:08d}", 0
    while target.exists():
        revision += 1
        target = parent / f"step-{step:08d}.{revision}"
    return target


def _step_and_revision(name: str) -> tuple[int, int]:
    match = _STEP.fullmatch(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def _remove(path: Path) -> None:
    # Without its manifest a folder is not a checkpoint, so a kill half way through leaves nothing that looks like one.
    with suppress(OSError):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
