"""The value that says how a job is run: every decision, frozen, and a YAML file that people can read and write.

In: a name with ranks, or a file. Out: a `Plan`. Never looks at the model: whether a plan suits a job is checked where
the two meet. What a plan leaves open (placements by pattern or by search) is resolved in `search/` before compiling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import yaml

from plait.errors import PlanError
from plait.plan.mesh import Mesh
from plait.plan.placements import AxisPlacements, placements_from
from plait.units import parse_bytes

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

Choice = Literal["megatron", "auto"]
SCHEDULE_NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-2", "pipedream")
"""Orders in which the stages of a pipeline can work."""
Recompute = Literal["none", "selective", "full"]


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
        _check_bool("sync.overlap", self.overlap)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What is kept whole on every rank of `data`, and what is kept for the backward."""

    zero: int = 0
    """0: all whole; 1: optimizer state sharded; 2: gradients too; 3: parameters too."""
    limit: str | None = None
    """Memory of a rank that the choice of placements may use, such as 70GiB; None: what megatron needs."""
    recompute: str | tuple[str, ...] = "none"
    """What the backward computes again instead of keeping it: `none`; `selective`: what is cheap; `full`: all but the
    inputs of the model's repeated blocks; or the modules, with `*`, of which only the inputs are kept."""

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3) or isinstance(self.zero, bool):
            raise PlanError(f"memory.zero={self.zero!r} is no stage.", fix="set it to 0, 1, 2 or 3.")
        if self.limit is not None:
            try:
                parse_bytes(str(self.limit))
            except ValueError as error:
                raise PlanError(
                    f"memory.limit={self.limit!r} is not a size.", fix="write it like 70GiB."
                ) from error
        if isinstance(self.recompute, str):
            if self.recompute not in get_args(Recompute):
                raise PlanError(
                    f"memory.recompute={self.recompute!r} is unknown.",
                    fix="use none, selective, full, or a list of modules such as [h.*.mlp].",
                )
            return
        names = self.recompute if isinstance(self.recompute, (list, tuple)) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise PlanError(
                f"memory.recompute={self.recompute!r} is no list of modules.",
                fix="use none, selective, full, or a list of modules such as [h.*.mlp].",
            )
        object.__setattr__(self, "recompute", tuple(names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """How weights are cut on the `tensor` axis."""

    choice: Choice = "megatron"
    """`megatron`: by pattern; `auto`: by exact minimization of communication."""
    sequence: bool = False
    """Whether norms and dropout between the blocks run on pieces of the sequence."""
    seconds: float = 20.0
    """Time limit of the minimization."""

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise PlanError(f"tensor.choice={self.choice!r} is unknown.", fix="use megatron or auto.")
        _check_bool("tensor.sequence", self.sequence)
        if not isinstance(self.seconds, (int, float)) or self.seconds <= 0:
            raise PlanError(f"tensor.seconds={self.seconds!r} is no time.", fix="set it to more than 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """How samples are cut on the `domain` axis."""

    dim: int | None = None
    """The dim of the batch's tensors; None: the rows of images (2), the positions of sequences (1)."""

    def __post_init__(self) -> None:
        if self.dim is not None and (
            not isinstance(self.dim, int) or isinstance(self.dim, bool) or self.dim < 1
        ):
            raise PlanError(
                f"domain.dim={self.dim!r} is no dim beside the samples'.", fix="set it to 1 or more."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipe:
    """How the model is cut over the `pipe` axis, and in which order its stages work."""

    schedule: str = "1f1b"
    """One of `SCHEDULE_NAMES`."""
    per_rank: int = 1
    """Stages a rank."""
    cut: tuple[str, ...] = ()
    """The modules with which the second and later stages begin; empty: cut by cost."""
    vertical_sync: bool = False
    """Of pipedream: whether a micro-batch sees weights of the same number of updates on all stages."""

    @property
    def asynchronous(self) -> bool:
        """Whether every micro-batch is an update of its own."""
        return self.schedule == "pipedream"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULE_NAMES:
            raise PlanError(
                f"pipe.schedule={self.schedule!r} is unknown.", fix=f"use one of {', '.join(SCHEDULE_NAMES)}."
            )
        if not isinstance(self.per_rank, int) or isinstance(self.per_rank, bool) or self.per_rank < 1:
            raise PlanError(
                f"pipe.per_rank={self.per_rank!r} is no number of stages.", fix="set it to 1 or more."
            )
        if isinstance(self.cut, str) or not all(isinstance(name, str) for name in self.cut):
            raise PlanError(f"pipe.cut={self.cut!r} is no list of modules.", fix="write it like [h.4, h.8].")
        object.__setattr__(self, "cut", tuple(self.cut))
        _check_bool("pipe.vertical_sync", self.vertical_sync)
        if self.vertical_sync and not self.asynchronous:
            raise PlanError(
                f"pipe.vertical_sync says nothing about schedule {self.schedule}, whose stages all update at the end.",
                fix="drop it, or use the plan pipedream.",
            )


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise PlanError(f"{name}={value!r} is neither true nor false.", fix="set it to true or false.")


_GROUPS: Mapping[str, type] = {
    "sync": Sync,
    "memory": Memory,
    "tensor": Tensor,
    "domain": Domain,
    "pipe": Pipe,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a job is run."""

    name: str
    """The named plan that it came from."""
    mesh: Mesh
    """The ranks and their axes."""
    sync: Sync = Sync()
    """How gradients meet."""
    memory: Memory = Memory()
    """What is sharded over `data`, and what is computed twice."""
    tensor: Tensor = Tensor()
    """How weights are cut over `tensor`."""
    domain: Domain = Domain()
    """How samples are cut over `domain`."""
    pipe: Pipe = Pipe()
    """How the model is cut over `pipe`."""
    placements: tuple[AxisPlacements, ...] = ()
    """Placements along axes other than `data`; what a person wrote stays, the rest is resolved before compiling."""

    def placements_of(self, axis: str) -> AxisPlacements | None:
        """What the plan says about an axis."""
        return next((entry for entry in self.placements if entry.axis == axis), None)

    @property
    def data_ranks(self) -> int:
        """Ranks among which the batch is split."""
        return self.mesh.size_of(DATA)

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
    allowed = {"plan", "mesh", "placements", *_GROUPS}
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
    return with_settings(plan, {group: dict(values[group] or {}) for group in _GROUPS if group in values})


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
    unknown = sorted(set(settings) - set(known))
    for group in set(settings) & set(known):
        unknown += sorted(f"{group}.{key}" for key in set(settings[group]) - known[group])
    if unknown:
        choices = [f"{group}.{name}" for group, names in known.items() for name in sorted(names)]
        raise PlanError(
            f"the plan has no setting {', '.join(unknown)}.", fix="use one of " + ", ".join(choices) + "."
        )
    changed = {group: replace(getattr(plan, group), **values) for group, values in settings.items()}
    return replace(plan, **changed)


SETTINGS = tuple(f"{group}.{field.name}" for group, kind in _GROUPS.items() for field in fields(kind))
"""Every setting of a plan, as `--set` takes it."""
