"""What is tried, as it is written down, and where its runs are.

In: what a person asks for. Out: the words of `plait run` for a trial and a fold; the folder of a try, which holds no
other; places for runs side by side.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plait.api.inputs.given import given_job, name_of
from plait.api.inputs.settings import write_arguments, write_settings
from plait.api.inputs.trust import fingerprint
from plait.errors import UsageError
from plait.files.document import Format
from plait.files.shape import read_json
from plait.files.write import write_whole
from plait.job.data.open import open_data
from plait.options import Changes, Elsewhere, Tries

_FORMAT = Format(noun="a try", error=UsageError, fix="choose another --out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is tried, and how its runs are started."""

    job: str
    plan: str | None
    ranks: int | None
    changes: Changes
    """Its arguments are what may be tried."""
    tries: Tries
    steps: int | None
    device: str
    engine: tuple[str, ...] = ()
    """Options of `plait run` that have an engine start it."""

    def command(self, args: Mapping[str, Any]) -> list[str]:
        """The arguments of `plait run` for these arguments of the job, on all of the data."""
        words = [self.job, *(word for entry in write_arguments(args) for word in ("--arg", entry))]
        words += ["--plan", self.plan] if self.plan is not None else []
        words += ["--ranks", str(self.ranks)] if self.ranks is not None else []
        mesh = ",".join(f"{name}={size}" for name, size in self.changes.mesh.items())
        words += ["--mesh", mesh] if mesh else []
        words += [word for entry in write_settings(self.changes.settings) for word in ("--set", entry)]
        return words + (["--device", self.device] if self.device != "cpu" else [])

    def fold(self, fold: int) -> dict[str, str]:
        """The setting that holds out a part."""
        return {"fold": f"{fold + 1}/{self.tries.folds}:{self.tries.seed}"} if self.tries.folds > 1 else {}

    def words(self, args: Mapping[str, Any], fold: int) -> list[str]:
        """Those for one fold."""
        held_out = [word for entry in write_settings(self.fold(fold)) for word in ("--set", entry)]
        return [*self.command(args), *held_out]

    def changed(self, args: Mapping[str, Any], fold: int) -> Changes:
        """What is changed of the job for one fold."""
        settings = {**self.changes.settings, **self.fold(fold)}
        return replace(self.changes, settings=settings, args=args)

    def total_steps(self, args: Mapping[str, Any], fold: int) -> int:
        """Of a whole trial."""
        if self.steps is not None:
            return self.steps
        job, _ = given_job(self.job, self.changed(args, fold))
        total = job.total_steps(open_data(job.data, job.collate).num_samples)
        if total is None:
            raise UsageError(
                "--search asha: a stream does not say how many steps there are.", fix="give --steps."
            )
        return total


def engine_words(elsewhere: Elsewhere, ranks: int | None) -> tuple[str, ...]:
    """Options of `plait run` that have an engine start it."""
    if elsewhere.engine is None:
        return ()
    several = [] if ranks is None else ["--ranks", str(ranks)]
    given = [word for entry in elsewhere.engine_set for word in ("--engine-set", entry)]
    return ("--engine", elsewhere.engine, "--hosts", str(elsewhere.hosts), *several, *given)


def claim(folder: Path | None, request: Request) -> Path:
    """The folder of this try, which holds no other: the same request has the same one."""
    changes, tries = request.changes, request.tries
    said = {
        "job": request.job, "args": {name: str(value) for name, value in changes.args.items()}, "plan": request.plan,
        "ranks": request.ranks, "mesh": dict(changes.mesh), "settings": write_settings(changes.settings),
        "steps": request.steps, "device": request.device, "folds": tries.folds, "seed": tries.seed,
        "search": tries.search, "metric": tries.metric, **fingerprint(request.job),
    }  # fmt: skip
    text = json.dumps(said, indent=2) + "\n"
    if folder is None:
        folder = Path("tries") / f"{name_of(request.job)}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path = folder / "try.json"
    if path.exists():
        before = read_json(path, dict[str, Any], _FORMAT)
        changed = [name for name in said if before.get(name) != said[name]]
        if changed:
            raise UsageError(
                f"{folder} holds another try: {', '.join(changed)} changed since.",
                fix="choose another --out.",
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is no folder of a try.", fix="choose a new folder.")
    else:
        write_whole(path, text)
    return folder


def places_for(request: Request, ranks: int) -> list[dict[str, str]]:
    """Places for runs, each with variables of its own: on this machine, `ranks` for each (0: all), or an engine's."""
    parallel = request.tries.parallel
    if request.engine:
        return [{}] * (parallel or 1)
    if request.device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = parallel or (max(1, cores // ranks) if ranks else 1)
        threads = str(max(1, cores // (count * max(ranks, 1))))
        says_itself = count == 1 or "OMP_NUM_THREADS" in os.environ
        return [{} if says_itself else {"OMP_NUM_THREADS": threads}] * count
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    ranks = ranks or len(devices)
    fit = max(1, len(devices) // max(ranks, 1))
    groups = [devices[place % fit * ranks :][:ranks] for place in range(parallel or fit)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]
