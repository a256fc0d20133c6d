"""The plans that can be asked for by name. A new one is a file with a function, and a line here."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait.errors import PlanError
from plait.plan.ddp import ddp
from plait.plan.plan import Plan, read_plan, with_settings
from plait.plan.single import single

NAMED: Mapping[str, Callable[[int], Plan]] = MappingProxyType({"single": single, "ddp": ddp})


def resolve(plan: str | Path | Plan, ranks: int | None, settings: Mapping[str, Any] | None = None) -> Plan:
    """A plan from a name, a YAML file or a plan; `ranks` must agree with it where both are given."""
    if ranks is not None and ranks < 1:
        raise PlanError(f"ranks={ranks} is not a number of processes.", fix="use 1 or more.")
    if isinstance(plan, Plan):
        found = plan
    elif str(plan) in NAMED:
        found = NAMED[str(plan)](ranks if ranks is not None else 1)
    elif Path(plan).suffix in (".yaml", ".yml"):
        found = read_plan(Path(plan))
        if found.name not in NAMED:
            raise PlanError(
                f"{plan} names the plan {found.name!r}, which does not exist.", fix=_choices(found.name)
            )
    else:
        raise PlanError(f"there is no plan {str(plan)!r}.", fix=_choices(str(plan)))
    if ranks is not None and found.mesh.size != ranks:
        axes = " x ".join(f"{name}={size}" for name, size in found.mesh.axes)
        raise PlanError(
            f"the plan's mesh {axes} has {found.mesh.size} ranks; {ranks} were asked for.",
            fix=f"use --ranks {found.mesh.size}, or change the mesh.",
        )
    return with_settings(found, settings or {})


def _choices(name: str) -> str:
    close = get_close_matches(name, NAMED, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose one of {', '.join(NAMED)}, or give a .yaml file."
