"""The value that says how a job is run: every decision, frozen, and a YAML file that people can read and write.

In: a name with ranks, or a file. Out: a `Plan`. Never looks at the model: whether a plan suits a job is checked where
the two meet. What a plan leaves open (placements by pattern or by search) is resolved in `search/` before compiling.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import yaml

from plait.errors import PlanError, did_you_mean
from plait.files.document import Document, Format, parse_yaml, read_yaml
from plait.files.shape import given_in, partial_of, shaped
from plait.plan.agreement import AGREEMENTS, Agreement
from plait.plan.decisions import (
    COMPILE,
    GRAPHS,
    LAYOUTS,
    REWRITE,
    Average,
    Compile,
    Domain,
    Elastic,
    Graphs,
    Hogwild,
    Layout,
    Links,
    Memory,
    Pipe,
    Rewrite,
    Sync,
    Tensor,
)
from plait.plan.mesh import Mesh
from plait.plan.placements import GROUPS, AxisPlacements, placements_from

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
    "links": Links,
}
_SCALARS = ("compile", "graphs", "layout", "rewrite")
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
    links: Links = Links()
    """How ranks reach each other."""
    compile: Compile = "auto"
    """Whether segments of the step are put through Inductor: `on`, beside steps that run as written; `before`, before
    they are first run; `auto`, like `on` where that is expected to pay."""
    graphs: Graphs = "auto"
    """Whether segments are launched as CUDA graphs: `auto`, where a GPU would wait for its host."""
    layout: Layout = "auto"
    """How convolutions have their weights and inputs in memory: `auto`, channels last on GPUs where they are most of
    the work; `as-is`, as the model was made."""
    rewrite: Rewrite = "auto"
    """Whether the captured graph is rewritten into a cheaper equal one: `auto`, where that is expected to pay."""
    placements: tuple[AxisPlacements, ...] = ()
    """Placements along axes other than `data`; what a person wrote stays, the rest is resolved before compiling."""

    def __post_init__(self) -> None:
        if self.compile not in COMPILE:
            raise PlanError(f"compile={self.compile!r} is not known.", fix=f"use {', '.join(COMPILE)}.")
        if self.graphs not in GRAPHS:
            raise PlanError(f"graphs={self.graphs!r} is not known.", fix=f"use {', '.join(GRAPHS)}.")
        if self.layout not in LAYOUTS:
            raise PlanError(f"layout={self.layout!r} is not known.", fix=f"use {', '.join(LAYOUTS)}.")
        if self.rewrite not in REWRITE:
            raise PlanError(f"rewrite={self.rewrite!r} is not known.", fix=f"use {', '.join(REWRITE)}.")
        if self.sync.rule not in AGREEMENTS:
            raise PlanError(
                f"sync.rule={self.sync.rule!r} is unknown.", fix=f"use one of {', '.join(AGREEMENTS)}."
            )

    @property
    def agreement(self) -> Agreement:
        """How workers agree on weights."""
        return AGREEMENTS[self.sync.rule](self.sync, self.elastic, self.average)

    def placements_of(self, axis: str) -> AxisPlacements | None:
        """What the plan says about an axis."""
        return next((entry for entry in self.placements if entry.axis == axis), None)

    @property
    def ranks(self) -> int:
        """All that run a program of their own: the workers of the mesh, then the servers."""
        return self.mesh.size + self.sync.servers

    @property
    def processes(self) -> int:
        """Processes that a run has: one a rank, or one for all where ranks are threads."""
        return 1 if self.agreement.threads else self.ranks

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
    def may_take_graphs(self) -> bool:
        """Whether a GPU may be given segments as CUDA graphs: to capture one waits for the device, which in a pipeline
        may wait for a message that depends on this rank."""
        return self.graphs != "off" and self.num_stages == 1

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
        content |= {name: value for name in _SCALARS if (value := getattr(self, name)) != "auto"}
        if self.placements:
            content["placements"] = {entry.axis: entry.to_plain() for entry in self.placements}
        return yaml.safe_dump(content, sort_keys=False, width=120)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


Named = Mapping[str, Callable[[int], "Plan"]]
"""Plans by name, each for a number of ranks."""


class _Placements(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, str] | None = None
    batch: dict[str, str] | None = None
    ops: dict[str, str] | None = None


_PARTIAL = {group: partial_of(kind) for group, kind in _GROUPS.items()}
_FILE = msgspec.defstruct(
    "PlanFile",
    [
        ("plan", str),
        ("mesh", dict[str, int] | None, None),
        *((group, kind | None, None) for group, kind in _PARTIAL.items()),
        *((name, str | bool | None, None) for name in _SCALARS),
        ("placements", dict[str, _Placements] | None, None),
    ],
    forbid_unknown_fields=True,
)
"""What a plan file may hold."""
_FORMAT = Format(
    noun="a plan",
    error=PlanError,
    fix="give `plan: NAME`, `mesh: {axis: size}` and optionally settings such as `sync: {bucket_mib: 8}`.",
)


def read_plan(path: Path, named: Named = MappingProxyType({})) -> Plan:
    """A plan from a YAML file; what it does not say is as in the plan of `named` that it names. A problem is told with
    its line."""
    return _plan_in(read_yaml(path, _FORMAT), named)


def parse_plan(text: str, named: Named = MappingProxyType({})) -> Plan:
    """A plan from the text of such a file."""
    return _plan_in(parse_yaml(text, "the plan", _FORMAT), named)


def _plan_in(document: Document, named: Named) -> Plan:
    given: Any = shaped(document, _FILE, _FORMAT)
    tables = {
        axis: {group: table for group in GROUPS if (table := getattr(groups, group))}
        for axis, groups in (given.placements or {}).items()
    }
    try:
        mesh = Mesh(axes=tuple((given.mesh or {}).items()))
        base = named[given.plan](1) if given.plan in named else Plan(name=given.plan, mesh=mesh)
        plan = replace(base, mesh=mesh if mesh.axes else base.mesh, placements=placements_from(tables))
        return _changed(plan, given)
    except PlanError as error:
        axis, field = _ABOUT.match(error.what).groups()  # type: ignore[union-attr]  # it matches anything
        path = tuple(field.split(".")) if not axis else ("mesh", field)
        raise PlanError(f"{document.at(path)}: {error.what}", fix=error.fix) from error


_ABOUT = re.compile(r"(axis )?([\w.]*)")
"""How errors of a plan's parts begin: with the field, or the axis of the mesh."""


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with some settings replaced: `{"sync": {"bucket_mib": 1}}`."""
    known = {group: {field.name for field in fields(kind)} for group, kind in _GROUPS.items()}
    unknown = sorted(set(settings) - set(known) - set(_SCALARS))
    for group in {name for name in known if isinstance(settings.get(name), Mapping)}:
        unknown += sorted(f"{group}.{key}" for key in set(settings[group]) - known[group])
    if unknown:
        choices = [
            *_SCALARS,
            *(f"{group}.{name}" for group, names in known.items() for name in sorted(names)),
        ]
        raise PlanError(
            f"the plan has no setting {', '.join(unknown)}.",
            fix=f"{did_you_mean(unknown[0], choices)}use one of {', '.join(choices)}.",
        )
    checked: Any = shaped(Document(values={"plan": plan.name, **settings}, where="settings"), _FILE, _FORMAT)
    return _changed(plan, checked)


def _changed(plan: Plan, given: Any) -> Plan:
    """The plan with what a file or settings say of it."""
    groups = {
        group: replace(getattr(plan, group), **given_in(partial))
        for group in _GROUPS
        if (partial := getattr(given, group)) is not None
    }
    scalars = {
        name: _ON_OFF.get(value, value) for name in _SCALARS if (value := getattr(given, name)) is not None
    }
    return replace(plan, **groups, **scalars)


SETTINGS = (
    *_SCALARS,
    *(f"{group}.{field.name}" for group, kind in _GROUPS.items() for field in fields(kind)),
)
"""Every setting of a plan, as `--set` takes it."""
