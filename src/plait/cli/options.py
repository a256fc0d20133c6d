"""Options that commands share, and how their text is read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from plait.api.inputs.settings import parse_arguments, parse_settings, split_settings
from plait.cli.flatten import Text
from plait.errors import UsageError
from plait.files.source import check_file, file_of
from plait.options import Changes
from plait.plan.named import NAMED, resolve

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="path.py[:function] or module:function; the function is `job` by default."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
DeviceName = Literal["cpu", "cuda"]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="Where it computes.")]

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="With --engine: show what would be started.", rich_help_panel="On other hosts"
    ),
]
EmulateOption = Annotated[
    str | None, typer.Option(help="A network between hosts: bandwidth=1Gbit,latency=1ms,hosts=2x2.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a run begins with and reads."""

    workers: int | None = None
    """Processes of each rank that read samples; a thread by default."""
    weights: Path | None = None
    """Begin with these weights: safetensors, state_dict, a Hugging Face folder, an index."""
    skip_bad: int | None = None
    """Damaged samples that are told and left out before a run fails."""

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the job that were given."""
        weights = None if self.weights is None else str(self.weights.absolute())
        said = {"workers": self.workers, "skip_bad": self.skip_bad, "weights": weights}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class How:
    """The plan."""

    plan: str | None = None
    """A plan's name or a .yaml file."""
    ranks: int | None = None
    """Number of processes."""


def num_ranks(how: How, changes: Changes) -> int | None:
    """Ranks that are asked for in all; None: nobody says."""
    return how.ranks if how.ranks is not None or not changes.mesh else prod(changes.mesh.values())


def look_first(job: str | None, how: How, changes: Changes, *, auto: bool = False) -> None:
    """Refuse what can be refused at once: a job that is not there, a plan that is none. torch takes seconds."""
    path = None if job is None else file_of(job)
    if path is not None:
        check_file(path)
    if not (auto and how.plan == "auto"):
        resolve(how.plan, how.ranks, split_settings(changes.settings)[1], changes.mesh)


def parse_mesh(text: str) -> dict[str, int]:
    """`data=2,tensor=2` as axes and their sizes."""
    mesh: dict[str, int] = {}
    for entry in text.split(","):
        name, separator, size = entry.strip().partition("=")
        if not separator or not re.fullmatch("[0-9]{1,9}", size) or name in mesh:
            raise UsageError(
                f"--mesh {text!r} is not AXIS=SIZE,...", fix="write it like --mesh data=2,tensor=2."
            )
        mesh[name] = int(size)
    return mesh


def parse_slow(entries: Sequence[str]) -> dict[int, float]:
    """`RANK=FACTOR` entries as how many times as long a rank takes to compute."""
    slow: dict[int, float] = {}
    for entry in entries:
        rank, _, factor = entry.partition("=")
        try:
            slow[int(rank)] = float(factor)
        except ValueError as error:
            raise UsageError(
                f"--slow {entry!r} is not RANK=FACTOR.", fix="write it like --slow 1=3."
            ) from error
    return slow


def parse_counts(text: str) -> list[int]:
    """`1,2,4,8` as numbers of devices."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--scale {text!r} is no list of numbers.", fix="write it like 1,2,4,8.") from error


TEXTS: Mapping[str, Text] = {
    "plan": Text(type=str, help=f"A name ({', '.join(NAMED)}), a .yaml file; `plait run` also takes `auto`."),
    "mesh": Text(type=str, metavar="AXIS=N,...", read=parse_mesh),
    "settings": Text(type=list[str], metavar="KEY=VALUE", read=parse_settings, option="--set"),
    "args": Text(type=list[str], metavar="NAME=VALUE", read=parse_arguments, option="--arg"),
    "trace": Text(
        type=bool,
        option="--no-trace",
        read=lambda off: not off,
        help="Do not record every instruction of every rank.",
    ),
    "check": Text(
        type=bool,
        option="--no-check",
        read=lambda off: not off,
        help="Do not hold the captured step against the model's own code once, before the run.",
    ),
    "slow": Text(type=list[str], metavar="RANK=FACTOR", read=parse_slow),
    "engine_set": Text(type=list[str], metavar="KEY=VALUE"),
    "weights": Text(type=Path, option="--from"),
}
"""Fields that are written in a way of their own."""
