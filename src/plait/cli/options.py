"""Options that commands share, and how their text is read."""

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from plait.cli.flatten import Text
from plait.errors import UsageError
from plait.plan.named import NAMED

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="path.py[:function] or module:function; the function is `job` by default."
    ),
]
PlanOption = Annotated[
    str | None, typer.Option("--plan", help=f"A plan's name ({', '.join(NAMED)}) or a .yaml file.")
]
RunPlanOption = Annotated[
    str | None, typer.Option("--plan", help=f"`auto`, a plan's name ({', '.join(NAMED)}) or a .yaml file.")
]
MeshOption = Annotated[
    str | None, typer.Option("--mesh", metavar="AXIS=N,...", help="Ranks along each axis: data=2,tensor=2.")
]
RanksOption = Annotated[int | None, typer.Option("--ranks", help="Number of processes.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change the job (batch=128) or the plan (sync.bucket_mib=4)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
DeviceOption = Annotated[str, typer.Option("--device", help="Of this machine: cpu or cuda.")]


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """`data=2,tensor=2` as axes and their sizes."""
    if text is None:
        return None
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


TEXTS = {"slow": Text(type=list[str], metavar="RANK=FACTOR", read=parse_slow)}
"""Fields of `plait.options` that are written in a way of their own."""
