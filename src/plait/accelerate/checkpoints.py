"""What `save_state` writes and `load_state` reads: states of what was prepared, and every rank's generator."""

import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from plait.accelerate.settings import ProjectConfiguration
from plait.errors import UsageError
from plait.files.write import write_whole
from plait.run.share_loader import ShareLoader


def next_folder(project: ProjectConfiguration) -> Path:
    """Where a project's next checkpoint goes: after all that are there."""
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        raise UsageError(
            "save_state() was not told where to.",
            fix="name a folder, or ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True).",
        )
    before = _numbered(project.project_dir)
    number = max([project.iteration, *(found + 1 for found in before)])
    project.iteration = number + 1
    return Path(project.project_dir) / "checkpoints" / f"checkpoint_{number}"


def make_room(project: ProjectConfiguration) -> None:
    """Delete the oldest, so that one more is as many as the project allows; tells which."""
    assert project.project_dir is not None
    before = list(_numbered(project.project_dir).values())
    most = len(before) + 1 if project.total_limit is None else project.total_limit
    for old in before[: max(len(before) + 1 - most, 0)]:
        print(f"{old} is deleted: total_limit={project.total_limit}.")
        shutil.rmtree(old)


def newest(project_dir: str | Path | None) -> Path:
    """The project's last checkpoint."""
    found = [] if project_dir is None else list(_numbered(project_dir).values())
    if not found:
        raise UsageError(
            f"{project_dir} holds no checkpoint_0, ...", fix="name a folder that save_state wrote."
        )
    return found[-1]


def _numbered(project_dir: str | Path) -> dict[int, Path]:
    """A project's checkpoints, oldest first."""
    found = {
        path.name.removeprefix("checkpoint_"): path
        for path in (Path(project_dir) / "checkpoints").glob("checkpoint_*")
    }
    return dict(sorted((int(number), path) for number, path in found.items() if number.isdigit()))


def save(
    folder: Path, kept: Mapping[str, Sequence[Any]], loaders: Sequence[ShareLoader], process: int
) -> None:
    """This rank's part; the states are the main process's."""
    folder.mkdir(parents=True, exist_ok=True)
    if process == 0:
        states = {kind: [one.state_dict() for one in entries] for kind, entries in kept.items()}
        _write({**states, "loaders": [loader.state_dict() for loader in loaders]}, folder / "state.pt")
    _write(torch.get_rng_state(), folder / f"random-{process}.pt")


def _write(value: Any, path: Path) -> None:
    """Whole, or what was there stays."""
    content = io.BytesIO()
    torch.save(value, content)
    write_whole(path, content.getbuffer())


def _read(path: Path) -> Any:
    """What a file of `save` holds; it runs no code of the file's."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what it meets in a file that is none
        told = str(error).splitlines()
        raise UsageError(
            f"{path} cannot be read: {told[0] if told else type(error).__name__}",
            fix="name a folder that save_state wrote.",
        ) from error


def load(
    folder: Path, kept: Mapping[str, Sequence[Any]], loaders: Sequence[ShareLoader], process: int
) -> None:
    """Into the same objects, on any number of ranks."""
    if not (folder / "state.pt").is_file():
        raise UsageError(f"{folder} holds no state.pt.", fix="name a folder that save_state wrote.")
    saved = _read(folder / "state.pt")
    missing = [kind for kind in (*kept, "loaders") if not isinstance(saved, dict) or kind not in saved]
    if missing:
        raise UsageError(
            f"{folder / 'state.pt'} has no {', '.join(missing)}.", fix="name a folder that save_state wrote."
        )
    for kind, entries in kept.items():
        if len(saved[kind]) != len(entries):
            raise UsageError(
                f"{folder} has {len(saved[kind])} {kind}; {len(entries)} were prepared.",
                fix="prepare the same objects as the script that saved it.",
            )
        for one, state in zip(entries, saved[kind], strict=True):
            one.load_state_dict(state)
    for loader, state in zip(loaders, saved["loaders"], strict=False):
        loader.load_state_dict(state)
    own = folder / f"random-{process}.pt"
    if own.is_file():
        torch.set_rng_state(_read(own))
