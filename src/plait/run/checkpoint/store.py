"""Checkpoints: a `TrainingState` written to a folder, read back, or exported under the user's own names.

In: a state and a folder. Out: `<folder>/step-00000120/` with the three files of `format.py` and a manifest,
atomically; and such a folder as a state again. A kill at any moment leaves the last good one. It never reads a pickle,
never communicates and never knows how many ranks there are, so any number of them may resume.
"""

import errno
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal
from uuid import uuid4

import torch
from safetensors import SafetensorError
from torch import Tensor

from plait.errors import CheckpointError
from plait.files.write import free_bytes, why_not_written
from plait.run.checkpoint.files import (
    MANIFEST,
    check_sums,
    complete_folders,
    prune_folders,
    read_manifest,
    step_folders,
    step_of,
    sync,
    sync_records,
    write_folder,
)
from plait.run.checkpoint.format import (
    FILES,
    read_state,
    write_json,
    write_model,
    write_optimizer,
    write_tensors,
)
from plait.run.checkpoint.state import TrainingState
from plait.units import format_bytes, format_seconds


def save_checkpoint(
    folder: Path,
    state: TrainingState,
    *,
    keep: int = 2,
    best_step: int | None = None,
    on_deleted: Callable[[list[str]], None] | None = None,
    time_limit_s: float | None = None,
) -> Path:
    """Write `state` as a new checkpoint in `folder`, then delete all but the `keep` newest and that of `best_step`.

    Raises `CheckpointError` when the disk is full or cannot be written, or when the limit has passed before all is
    written; the checkpoints that were there are untouched then, and nothing half-written stays.
    """
    if keep < 1:
        raise CheckpointError(f"keep={keep} would delete the checkpoint just written", fix="keep at least 1.")
    started_s = time.monotonic()
    num_bytes = state_bytes(state)

    def write(temporary: Path) -> None:
        for part in (write_model, write_optimizer, write_json):
            part(temporary, state)
            elapsed_s = time.monotonic() - started_s
            if time_limit_s is not None and elapsed_s > time_limit_s:
                raise CheckpointError(
                    f"writing the checkpoint of step {state.step} ({format_bytes(num_bytes)}) to {folder} took over"
                    f" {format_seconds(time_limit_s)}: given up after {format_seconds(elapsed_s)}",
                    fix="raise the time limit, or save to a faster disk.",
                )

    try:
        free = free_bytes(folder)
        if free is not None and free < num_bytes:  # before the little that is left is filled in vain
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync_records(folder.parent)
        path = write_folder(folder, state.step, FILES, write)
        deleted = prune_folders(folder, FILES, keep=keep, newest=path, best_step=best_step)
        if on_deleted is not None:
            on_deleted(deleted)
    except (OSError, SafetensorError) as error:
        reason, fix = why_not_written(folder, error, num_bytes)
        raise CheckpointError(
            f"the checkpoint of step {state.step} cannot be written to {folder}: {reason}", fix=fix
        ) from error
    return path


def newest_step(folder: Path, path: Path | None) -> int | None:
    """The step of a checkpoint, where it is the newest of a folder of checkpoints; else None."""
    if path is None or not folder.is_dir():
        return None
    complete = complete_folders(folder, FILES)
    return step_of(path) if complete and complete[0].path.resolve() == path.resolve() else None


def locate_checkpoint(path: Path, *, on_notice: Callable[[str], None] | None = None) -> Path:
    """The newest undamaged checkpoint in a run folder or a folder of checkpoints, or `path` itself if it is one.

    Where the newest is torn or damaged, the one before is taken and `on_notice` told (by default a warning is
    issued). A checkpoint that was named itself is taken or refused, never replaced by another.
    """
    notify = on_notice or (lambda message: warnings.warn(message, stacklevel=3))
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}", fix="give a run folder or one of its checkpoints."
        )
    if step_of(path) is not None or (path / MANIFEST).exists():
        check_sums(read_manifest(path, FILES))
        return path
    parent = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    passed_over: list[tuple[Path, str]] = []
    complete = complete_folders(parent, FILES)
    for folder in complete:
        try:
            check_sums(folder)
        except CheckpointError as error:
            passed_over.append((folder.path, str(error)))
            continue
        for incomplete in step_folders(parent):
            later = (step_of(incomplete) or 0) > (step_of(folder.path) or 0)
            if later and incomplete not in [one.path for one in complete]:
                passed_over.append((incomplete, "it was not written completely"))
        for damaged, reason in passed_over:
            notify(f"checkpoint {damaged.name} is passed over ({reason}); {folder.path.name} is used")
        return folder.path
    damaged_names = ", ".join(folder.name for folder in step_folders(parent))
    raise CheckpointError(
        f"{parent} holds no complete checkpoint" + (f"; damaged: {damaged_names}" if damaged_names else ""),
        fix="give the folder of a run that saved one, or start anew without --resume.",
    )


def load_checkpoint(path: Path, *, on_notice: Callable[[str], None] | None = None) -> TrainingState:
    """The state in the checkpoint that `locate_checkpoint` finds, on the CPU."""
    return read_state(locate_checkpoint(path, on_notice=on_notice))


def export_checkpoint(
    path: Path,
    *,
    to: Literal["safetensors", "state_dict"],
    out: Path,
    on_notice: Callable[[str], None] | None = None,
) -> Path:
    """Write the model's weights and persistent buffers to one file under the user's own names; returns the file.

    `safetensors`: tied weights once, the map of their other names as JSON in the metadata under `aliases`.
    `state_dict`: a `torch.save`d dict with every name, tied ones sharing memory, for `load_state_dict`.
    """
    if to not in ("safetensors", "state_dict"):
        raise CheckpointError(f"cannot export to {to!r}", fix="use safetensors or state_dict.")
    state = load_checkpoint(path, on_notice=on_notice)
    if out.is_dir():
        out = out / ("model.safetensors" if to == "safetensors" else "model.pt")
    tensors = state.parameters | {
        name: tensor for name, tensor in state.buffers.items() if name not in state.transient
    }
    aliases = {alias: name for alias, name in state.aliases.items() if name in tensors}
    temporary = out.with_name(f".{out.name}-{os.getpid()}-{uuid4().hex[:8]}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if to == "safetensors":
            write_tensors(temporary, tensors, aliases=aliases)
        else:
            torch.save(tensors | {alias: tensors[name] for alias, name in aliases.items()}, temporary)
            sync(temporary)
        temporary.replace(out)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason, fix = why_not_written(out.parent, error, _bytes(tensors))
        raise CheckpointError(f"{out} cannot be written: {reason}", fix=fix) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return out


def state_bytes(state: TrainingState) -> int:
    """Bytes of all tensors in the state: what a checkpoint of it takes on the disk, bar a little JSON."""
    optimizer = sum(_bytes(tensors) for tensors in state.optimizer.tensors.values())
    return (
        _bytes(state.parameters)
        + _bytes(state.buffers)
        + _bytes(state.beside)
        + _bytes(state.average)
        + optimizer
    )


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
