"""Whether the job that a run folder names may be imported again.

In: what a run remembers of its job. Out: a sentence that says which file is about to be run, or a `UsageError`. A file
that has changed since, or that belongs to somebody else, is run only if the user says so: importing it runs its code.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import UsageError


def fingerprint(reference: str) -> dict[str, str]:
    """The file of a job that was loaded, and its sum: what a run remembers beside the reference."""
    source = reference.rpartition(":")[0] or reference
    is_file = source.endswith(".py") or "/" in source
    file = source if is_file else getattr(sys.modules.get(source), "__file__", None)
    try:
        path = Path(file or "").resolve()
        return {"job_file": str(path), "job_sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    except OSError:  # a job of several files, or of none
        return {}


def anywhere(reference: str) -> str:
    """The reference with a path that holds from every folder, for resuming."""
    path, colon, function = reference.partition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path.endswith(".py") else reference


def check_remembered(folder: Path, stored: Mapping[str, Any], *, trust: bool) -> str:
    """Say what will be imported; refuse what the user cannot know unless `trust`."""
    reference, file, before = stored["job"], stored.get("job_file"), stored.get("job_sha256")
    told = f"imports {file or reference}, as {folder / 'environment.json'} says"
    if trust:
        return told
    named = f"plait run {reference} --resume {folder}"
    for path in (folder, *([Path(file)] if file else [])):
        owner = _owner(path)
        if owner not in (None, os.geteuid(), 0):
            raise UsageError(
                f"--resume {told}; {path} belongs to another user (id {owner}), and importing runs their code.",
                fix=f"read it first; then name the job yourself ({named}), or add --trust-job.",
            )
    if file is None or before is None:
        return told
    try:
        now = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(
            f"--resume {told}; it cannot be read: {error.strerror}.", fix=f"name the job: {named}."
        ) from error
    if now != before:
        raise UsageError(
            f"--resume {told}; it has changed since the run (SHA-256 {now[:12]}, it was {before[:12]}).",
            fix=f"if the change is yours, name the job yourself ({named}), or add --trust-job.",
        )
    return told


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None
