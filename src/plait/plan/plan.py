"""The value that says how a job is run: every decision, frozen, and a YAML file that people can read and write.

In: a name with ranks, or a file. Out: a `Plan`. Never looks at the model: whether a plan suits a job is checked where
the two meet. What a plan leaves open (placements by pattern or by search) is resolved in `search/` before compiling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from plait.errors import PlanError
from plait.plan.decisions import (
    COMPILE,
    Average,
    Compile,
    Domain,
    Elastic,
    Hogwild,
    Memory,
    Pipe,
    Sync,
    Tensor,
)
from plait.plan.mesh import Mesh
from plait.plan.placements import AxisPlacements, placements_from

DATA = "data"
"""The mesh axis on which the batch is cut."""
TENSOR = "tensor"
"""The mesh axis on which weights are cut."""
DOMAIN = "domain"
"""The mesh axis on which images or sequences are cut."""
PIPE = "pipe"
"""The mesh axis on which the model is cut into stages."""
AXES = (PIPE, DATA, DOMAIN, TENSOR)
"""The axes that plans know, outermost first: ranks that exchange most are next to each other."""

_GROUPS: Mapping[str, type] = {
    "sync": Sync,
    "elastic": Elastic,
    "average": Average,
    "hogwild": Hogwild,
    "memory": Memory,
    "tensor": Tensor,
    "domain": Domain,
    "pipe": Pipe,
}
_SCALARS = ("compile",)
"""Decisions that are no group."""
_ON_OFF = {True: "on", False: "off"}
"""What YAML makes of `on` and `off`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """Of how many shards a rank holds one, of each kind of state."""

    parameters: int
    gradients: int
    optimizer: int

    def held(self, *, parameters: float, gradients: float, optimizer: float) -> float:
        """Bytes on a rank of state that takes these in all: the rule of every estimate before a program is compiled."""
        return parameters / self.parameters + gradients / self.gradients + optimizer / self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a job is run."""

    name: str
    """The named plan that it came from."""
    mesh: Mesh
    """The ranks and their axes."""
    sync: Sync = Sync()
    """How gradients meet."""
    elastic: Elastic = Elastic()
    """Of easgd: how workers and center pull at each other."""
    average: Average = Average()
    """Of local-sgd and diloco: when and how weights are averaged."""
    hogwild: Hogwild = Hogwild()
    """Of hogwild: what workers share."""
    memory: Memory = Memory()
    """What is sharded over `data`, and what is computed twice."""
    tensor: Tensor = Tensor()
    """How weights are cut over `tensor`."""
    domain: Domain = Domain()
    """How samples are cut over `domain`."""
    pipe: Pipe = Pipe()
    """How the model is cut over `pipe`."""
    compile: Compile = "auto"
    """Whether segments of the step are put through Inductor: `auto`, where that is expected to pay."""
    placements: tuple[AxisPlacements, ...] = ()
    """Placements along axes other than `data`; what a person wrote stays, the rest is resolved before compiling."""

    def __post_init__(self) -> None:
        if self.compile not in COMPILE:
            raise PlanError(f"compile={self.compile!r} is not known.", fix=f"use {', '.join(COMPILE)}.")

    def placements_of(self, axis: str) -> AxisPlacements | None:
        """What the plan says about an axis."""
        return next((entry for entry in self.placements if entry.axis == axis), None)

    @property
    def ranks(self) -> int:
        """All processes: the workers of the mesh, then the servers."""
        return self.mesh.size + self.sync.servers

    @property
    def data_ranks(self) -> int:
        """Ranks among which the batch is split."""
        return self.mesh.size_of(DATA)

    @property
    def shards(self) -> "Shards":
        """Into how many shards ZeRO cuts the state of training over `data`."""
        zero = self.memory.zero
        return Shards(
            parameters=self.data_ranks if zero == 3 else 1,
            gradients=self.data_ranks if zero >= 2 else 1,
            optimizer=self.data_ranks if zero >= 1 else 1,
        )

    def data_coordinate(self, rank: int) -> int:
        """Which share of the batch a rank has."""
        return self.mesh.coordinate(rank, DATA)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; 1: none."""
        ranks = self.mesh.size_of(PIPE)
        return ranks * self.pipe.per_rank if ranks > 1 else 1

    def to_yaml(self) -> str:
        """The plan as a file that `read_plan` takes; settings of axes that the mesh does not have are left out."""
        content: dict[str, Any] = {"plan": self.name, "mesh": dict(self.mesh.axes)}
        for group, kind in _GROUPS.items():
            value = getattr(self, group)
            if group in ("sync", "memory") or value != kind() or self.mesh.size_of(group) > 1:
                content[group] = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        if self.compile != "auto":
            content["compile"] = self.compile
        if self.placements:
            content["placements"] = {entry.axis: entry.to_plain() for entry in self.placements}
        return yaml.safe_dump(content, sort_keys=False, width=120)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


Named = Mapping[str, Callable[[int], "Plan"]]
"""Plans by name, each for a number of ranks."""


def plan_from(values: Mapping[str, Any], where: str, named: Named = MappingProxyType({})) -> Plan:
    """A plan from the contents of a file: what it does not say is as in the plan that it names.

    Every problem is named with what is allowed.
    """
    allowed = {"plan", "mesh", "placements", *_SCALARS, *_GROUPS}
    unknown = sorted(set(values) - allowed)
    if unknown or "plan" not in values or not isinstance(values.get("mesh", {}), Mapping):
        raise PlanError(
            f"{where} is not a plan: "
            + (f"unknown keys {', '.join(unknown)}." if unknown else "`plan` or `mesh` is missing."),
            fix="give `plan: NAME`, `mesh: {axis: size}` and optionally `sync: {bucket_mib: 8}`.",
        )
    mesh = Mesh(axes=tuple((str(axis), size) for axis, size in values.get("mesh", {}).items()))
    name = str(values["plan"])
    base = named[name](1) if name in named else Plan(name=name, mesh=mesh)
    plan = replace(
        base,
        mesh=mesh if mesh.axes else base.mesh,
        placements=placements_from(values.get("placements") or {}, where),
    )
    groups = {group: dict(values[group] or {}) for group in _GROUPS if group in values}
    return with_settings(plan, groups | {name: values[name] for name in _SCALARS if name in values})


def read_plan(path: Path, named: Named = MappingProxyType({})) -> Plan:
    """A plan from a YAML file; `named` are the plans that it may name."""
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
    return plan_from(values, str(path), named)


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with some settings replaced: `{"sync": {"bucket_mib": 1}}`."""
    known = {group: {field.name for field in fields(kind)} for group, kind in _GROUPS.items()}
    unknown = sorted(set(settings) - set(known) - set(_SCALARS))
    for group in set(settings) & set(known):
        unknown += sorted(f"{group}.{key}" for key in set(settings[group]) - known[group])
    if unknown:
        choices = [
            *_SCALARS,
            *(f"{group}.{name}" for group, names in known.items() for name in sorted(names)),
        ]
        raise PlanError(
            f"the plan has no setting {', '.join(unknown)}.", fix="use one of " + ", ".join(choices) + "."
        )
    changed = {
        name: _ON_OFF.get(value, value) if name in _SCALARS else replace(getattr(plan, name), **value)
        for name, value in settings.items()
    }
    return replace(plan, **changed)


SETTINGS = (
    *_SCALARS,
    *(f"{group}.{field.name}" for group, kind in _GROUPS.items() for field in fields(kind)),
)
"""Every setting of a plan, as `--set` takes it."""
