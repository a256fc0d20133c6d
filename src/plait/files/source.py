"""The Python file that a job is in, looked for before anything is imported.

In: a reference such as `path.py:function`. Out: nothing, or an error with what is there instead.
"""

from pathlib import Path

from plait.errors import UsageError, did_you_mean


def file_of(reference: str) -> Path | None:
    """The file that a reference names; None: it names a module."""
    source = reference.rpartition(":")[0] or reference
    return Path(source) if source.endswith(".py") or "/" in source else None


def check_file(path: Path) -> None:
    """Raise where there is no such file."""
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        beside = sorted(file.name for file in folder.glob("*.py")) if folder.is_dir() else []
        nearby = f"; {folder} has {', '.join(beside[:8])}" if beside else ""
        raise UsageError(
            f"{path} is a folder{nearby}." if path is folder else f"there is no file {path}{nearby}.",
            fix="name a file in it."
            if path is folder
            else f"{did_you_mean(path.name, beside)}check the path; it is taken from the current folder.",
        )
