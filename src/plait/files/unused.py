"""Whether a run may have a folder: a new one, or one that goes on.

In: the folder that was asked for. Out: nothing, or an error with what it holds.
"""

from pathlib import Path

from plait.errors import UsageError

COPY_NAME = ".copy"
"""What a host has of a run whose folder is on the disk of another, at the place of that folder."""


def check_there(folder: Path) -> None:
    """Raise where there is no folder of a run that is to go on."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no run folder {folder} to resume.", fix="give the folder that plait run printed."
        )


def check_unused(folder: Path) -> None:
    """Raise where a folder holds a run, or files of somebody else: that of a run is new, empty, or was begun by one."""
    if (folder / "metrics.jsonl").exists() or (folder / COPY_NAME).exists():
        raise UsageError(
            f"{folder} already holds a run.",
            fix=f"choose another --out, or continue it with --resume {folder}.",
        )
    try:
        held = sorted(path.name for path in folder.iterdir())
    except OSError:  # there is none, or it is a file, which is told when it is made
        return
    if held and not {"checkpoints", "environment.json", "plan.yaml"} & set(held):
        what = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
        raise UsageError(
            f"{folder} is no run folder: it holds {what}.",
            fix=f"choose a new folder, such as --out {folder / 'run'}.",
        )
