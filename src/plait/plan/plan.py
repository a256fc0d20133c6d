"""The value that says how a job is run: every decision, frozen, and a YAML file that people can read and write.

In: a name with ranks, or a file. Out: a resolved `Plan`. Never looks at the model: whether a plan suits a job is
checked where the two meet, in `program/compile.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from plait.errors import PlanError
from plait.plan.mesh import Mesh

DATA = "data"
"""The mesh axis on which the batch is cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """How gradients meet."""

    bucket_mib: float = 8.0
    """Gradients travel together in buckets of about this size; 0 sends each tensor on its own."""
    overlap: bool = True
    """Whether a bucket is sent while the backward goes on."""

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_mib, (int, float)) or self.bucket_mib < 0:
            raise PlanError(
                f"sync.bucket_mib={self.bucket_mib!r} is not a size.", fix="set it to 0 or more MiB."
            )
        if not isinstance(self.overlap, bool):
            raise PlanError(
                f"sync.overlap={self.overlap!r} is neither true nor false.", fix="set it to true or false."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A resolved plan."""

    name: str
    """The named plan that it came from."""
    mesh: Mesh
    """The ranks and their axes."""
    sync: Sync
    """How gradients meet."""

    def to_yaml(self) -> str:
        """The plan as a file that `read_plan` takes."""
        sync = {field.name: getattr(self.sync, field.name) for field in fields(self.sync)}
        return yaml.safe_dump(
            {"plan": self.name, "mesh": dict(self.mesh.axes), "sync": sync}, sort_keys=False
        )


def plan_from(values: Mapping[str, Any], where: str) -> Plan:
    """A plan from the contents of a file; every problem is named with what is allowed."""
    allowed = {"plan", "mesh", "sync"}
    unknown = sorted(set(values) - allowed)
    if unknown or "plan" not in values or not isinstance(values.get("mesh", {}), Mapping):
        raise PlanError(
            f"{where} is not a plan: "
            + (f"unknown keys {', '.join(unknown)}." if unknown else "`plan` or `mesh` is missing."),
            fix="give `plan: NAME`, `mesh: {axis: size}` and optionally `sync: {bucket_mib: 8}`.",
        )
    mesh = Mesh(axes=tuple((str(axis), size) for axis, size in values.get("mesh", {}).items()))
    return with_settings(
        Plan(name=str(values["plan"]), mesh=mesh, sync=Sync()), {"sync": dict(values.get("sync") or {})}
    )


def read_plan(path: Path) -> Plan:
    """A plan from a YAML file."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise PlanError(
            f"the plan file {path} cannot be read: {error.strerror}.", fix="check the path."
        ) from error
    except yaml.YAMLError as error:
        raise PlanError(
            f"{path} is not YAML: {error}.", fix="see docs/architecture.md for a plan file."
        ) from error
    if not isinstance(values, Mapping):
        raise PlanError(f"{path} holds no plan.", fix="start it with `plan: ddp`.")
    return plan_from(values, str(path))


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with some settings replaced: `{"sync": {"bucket_mib": 1}}`."""
    unknown = sorted(set(settings) - {"sync"})
    known = {field.name for field in fields(Sync)}
    unknown += sorted(f"sync.{key}" for key in set(settings.get("sync", {})) - known)
    if unknown:
        raise PlanError(
            f"the plan has no setting {', '.join(unknown)}.",
            fix="use one of " + ", ".join(f"sync.{name}" for name in sorted(known)) + ".",
        )
    return replace(plan, sync=replace(plan.sync, **settings.get("sync", {})))
