"""Whether the job that a run folder names may be imported again.

In: what a run remembers of its job. Out: a sentence that says which file is about to be run, or a `UsageError`. A file
that has changed since, or that belongs to somebody else, is run only if the user says so: importing it runs its code.
So is one that a folder names without this user's seal: any function of any file of his, with any arguments, would be
called otherwise for whoever hands him a folder.
"""

import hmac
import json
import os
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from plait.errors import UsageError
from plait.run.join.token import key_path, own_key
from plait.run.start.party import place_here


def fingerprint(reference: str) -> dict[str, str]:
    """The file of a job that was loaded, and its sum: what a run remembers beside the reference."""
    source = reference.rpartition(":")[0] or reference
    is_file = source.endswith(".py") or "/" in source
    file = source if is_file else getattr(sys.modules.get(source), "__file__", None)
    try:
        path = Path(file or "").resolve()
        return {"job_file": str(path), "job_sha256": sha256(path.read_bytes()).hexdigest()}
    except OSError:  # a job of several files, or of none
        return {}


def anywhere(reference: str) -> str:
    """The reference with a path that holds from every folder, for resuming."""
    path, colon, function = reference.partition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path.endswith(".py") else reference


def seal(remembered: Mapping[str, Any]) -> dict[str, str]:
    """By which users know that they have named this job with these arguments; nothing where they can have no key."""
    try:
        return {"job_seal": _seal(remembered, own_key(Path.home()))}
    except (UsageError, RuntimeError):  # no home, or none to write to
        return {}


def _seal(remembered: Mapping[str, Any], key: bytes) -> str:
    said = [remembered.get(name) or None for name in ("job", "args", "job_file", "job_sha256")]
    return hmac.new(key, json.dumps(["job", *said]).encode(), sha256).hexdigest()


def _is_sealed(stored: Mapping[str, Any]) -> bool:
    """Whether the job is one that this user has named. A user without a key, as in a new container, cannot know; nor
    where several hosts take part, each of which may have a key of its own."""
    place = place_here()
    if place is not None and place.tasks > place.local_tasks:
        return True
    try:
        if not key_path(Path.home()).exists():
            return True
        return hmac.compare_digest(_seal(stored, own_key(Path.home())), stored.get("job_seal", ""))
    except (UsageError, RuntimeError, TypeError):  # no home; a seal that is no ASCII
        return False


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
    if not _is_sealed(stored):
        raise UsageError(
            f"--resume {told}; it does not bear your seal: somebody else has started that run, or changed what it says"
            f" of its job{_with_arguments(stored)}.",
            fix=f"look at it; then name the job yourself ({named}), or add --trust-job.",
        )
    if file is None or before is None:
        return told
    try:
        now = sha256(Path(file).read_bytes()).hexdigest()
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


def _with_arguments(stored: Mapping[str, Any]) -> str:
    args = stored.get("args")
    return f" ({', '.join(args)})" if args else ""


def _owner(path: Path) -> int | None:
    try:
        return path.stat().st_uid
    except OSError:
        return None
