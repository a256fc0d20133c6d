"""The plans that can be asked for by name. A new one is a file with a function, and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait.errors import PlanError, did_you_mean
from plait.plan.ddp import ddp
from plait.plan.decisions import Links
from plait.plan.domain import domain
from plait.plan.mesh import Mesh
from plait.plan.pipeline import (
    gpipe,
    interleaved,
    naive,
    one_forward_one_backward,
    pipedream,
    zero_bubble,
    zero_bubble_2,
)
from plait.plan.plan import AXES, DATA, DOMAIN, PIPE, TENSOR, Plan, read_plan, with_settings
from plait.plan.relaxed import (
    diloco,
    easgd,
    hogwild,
    local_sgd,
    server_async,
    server_stale,
    server_sync,
)
from plait.plan.single import single
from plait.plan.tensor import megatron, tensor
from plait.plan.threads import threads
from plait.plan.zero import zero1, zero2, zero3

NAMED: Mapping[str, Callable[[int], Plan]] = MappingProxyType(
    {
        "single": single, "threads": threads, "ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3,
        "megatron": megatron, "tensor": tensor, "domain": domain,
        "naive": naive, "gpipe": gpipe, "1f1b": one_forward_one_backward, "interleaved": interleaved,
        "zero-bubble": zero_bubble, "zero-bubble-2": zero_bubble_2,
        "pipedream": pipedream,
        "server-sync": server_sync, "server-async": server_async, "server-stale": server_stale,
        "hogwild": hogwild, "easgd": easgd, "local-sgd": local_sgd, "diloco": diloco,
    }
)  # fmt: skip


def resolve(
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Plan:
    """A plan from a name, a YAML file or a plan; `mesh` sizes its axes, `ranks` must agree where both are given."""
    if ranks is not None and ranks < 1:
        raise PlanError(f"ranks={ranks} is not a number of processes.", fix="use 1 or more.")
    if plan is None:
        plan = _by_axes(mesh) if mesh else ("single" if ranks in (None, 1) else "ddp")
    if isinstance(plan, Plan):
        found = plan
    elif check_known(plan) and str(plan) in NAMED:
        found = NAMED[str(plan)](1 if ranks is None or mesh else ranks)
    else:
        found = read_plan(Path(plan), NAMED)
        if found.name not in NAMED:
            raise PlanError(
                f"{plan} names the plan {found.name!r}, which does not exist.", fix=_choices(found.name)
            )
    if mesh or DATA not in dict(found.mesh.axes):
        found = _with_mesh(found, mesh or {})
    _check_axes(found.mesh)
    _check_placements(found)
    _check_own_axis(found)
    found = with_settings(found, settings or {})
    _check_compress(found)
    _check_sequence(found)
    if not found.agreement.sums or found.agreement.threads:
        found = _with_workers(found, ranks if str(plan) in NAMED and not mesh else None)
    if ranks is not None and found.ranks != ranks:
        axes = " x ".join(f"{name}={size}" for name, size in found.mesh.axes)
        servers = f" and {found.sync.servers} servers" if found.sync.servers else ""
        raise PlanError(
            f"the plan's mesh {axes}{servers} has {found.ranks} ranks; {ranks} were asked for.",
            fix=f"use --ranks {found.ranks}, or change the mesh.",
        )
    return found


def check_known(plan: str | Path) -> bool:
    """Whether there may be such a plan: it has a name, or is a file; raises where it is neither."""
    if str(plan) not in NAMED and Path(plan).suffix not in (".yaml", ".yml"):
        raise PlanError(f"there is no plan {str(plan)!r}.", fix=_choices(str(plan)))
    return True


def usual_ranks(plan: str | Path | Plan | None) -> int | None:
    """Ranks to look at a plan on where none are given: 2, or what a file says."""
    if isinstance(plan, Plan):
        return None
    return 1 if plan == "single" else 2 if plan is None or str(plan) in NAMED else None


def _with_workers(plan: Plan, ranks: int | None) -> Plan:
    """A plan whose workers do not wait, checked; of `ranks`, those that are no servers are workers."""
    sync, others = plan.sync, [name for name, size in plan.mesh.axes if name != DATA and size > 1]
    if others or plan.memory.zero:
        what = f"the axis {others[0]}" if others else f"memory.zero={plan.memory.zero}"
        raise PlanError(
            f"plan {plan.name} trains whole models on every worker; {what} cuts them.",
            fix="drop it, or choose a synchronous plan such as ddp.",
        )
    if plan.agreement.threads and plan.links != Links():
        raise PlanError(
            f"plan {plan.name} has all ranks in one process, which meet in its memory.",
            fix="drop the settings links.*, or use the plan ddp.",
        )
    least, most = plan.agreement.least_servers, plan.agreement.most_servers
    if plan.agreement.mix == "elastic":  # whether a rank has the center follows from the variant
        plan = replace(plan, sync=replace(sync, servers=least))
    elif sync.servers < least:
        raise PlanError(f"plan {plan.name} with sync.servers=0 has no server.", fix="set it to 1 or more.")
    elif most is not None and sync.servers > most:
        raise PlanError(f"plan {plan.name} has no servers.", fix="drop sync.servers.")
    if ranks is None:
        return plan
    workers = ranks - plan.sync.servers
    if workers < 1:
        raise PlanError(
            f"{ranks} ranks of which {plan.sync.servers} are servers leave no worker.",
            fix=f"use --ranks {plan.sync.servers + 1} or more"
            + (", or fewer servers." if plan.sync.servers > 1 else "."),
        )
    return replace(plan, mesh=Mesh(axes=((DATA, workers),)))


def _check_compress(plan: Plan) -> None:
    """Gradients are compressed bucket by bucket, in one all-reduce each."""
    if plan.sync.compress == "none":
        return
    pipe = plan.mesh.size_of(PIPE)
    if plan.memory.zero or pipe > 1:
        what = f"memory.zero={plan.memory.zero} scatters" if plan.memory.zero else f"{PIPE}={pipe} splits"
        raise PlanError(
            f"sync.compress={plan.sync.compress} works on gradients that are all-reduced; {what} them.",
            fix="drop it, or use the plan ddp.",
        )


def _check_sequence(plan: Plan) -> None:
    if plan.tensor.sequence and plan.mesh.size > 1 and plan.mesh.size_of(TENSOR) == 1:
        axes = " x ".join(f"{name}={size}" for name, size in plan.mesh.axes)
        raise PlanError(
            f"tensor.sequence cuts sequences along the axis {TENSOR}, of which the mesh {axes} has one rank.",
            fix=f"add {TENSOR}=2 to the mesh, or drop tensor.sequence.",
        )


def _check_own_axis(plan: Plan) -> None:
    """A plan must have ranks along the axis that it is about, where it has several ranks at all."""
    if plan.name not in NAMED or plan.name == "single" or plan.mesh.size == 1 or not plan.agreement.sums:
        return
    own = next(axis for axis, size in NAMED[plan.name](2).mesh.axes if size == 2)
    if plan.mesh.size_of(own) == 1:
        axes = " x ".join(f"{name}={size}" for name, size in plan.mesh.axes)
        raise PlanError(
            f"plan {plan.name} works along the axis {own}, of which the mesh {axes} has one rank.",
            fix=f"add {own}=2 to the mesh, or choose a plan for these axes.",
        )


def _by_axes(mesh: Mapping[str, int]) -> str:
    return "1f1b" if PIPE in mesh else "megatron" if TENSOR in mesh else "domain" if DOMAIN in mesh else "ddp"


def _with_mesh(plan: Plan, mesh: Mapping[str, int]) -> Plan:
    """The plan on another mesh: axes that are named are sized, its own others stay."""
    if plan.name == "single" and any(size != 1 for size in mesh.values()):
        raise PlanError("plan single runs on 1 rank.", fix="drop --mesh, or choose another plan.")
    sizes = {DATA: 1} | {name: size for name, size in plan.mesh.axes if size != 1} | dict(mesh)
    order = sorted(sizes, key=lambda name: AXES.index(name) if name in AXES else -1)
    return replace(plan, mesh=Mesh(axes=tuple((name, sizes[name]) for name in order)))


def _check_axes(mesh: Mesh) -> None:
    unknown = [name for name, _ in mesh.axes if name not in AXES]
    if unknown:
        raise PlanError(
            f"no plan can use the mesh axis {unknown[0]!r}.",
            fix=f"{did_you_mean(unknown[0], AXES)}the axes are {', '.join(AXES)}.",
        )


def _check_placements(plan: Plan) -> None:
    known = dict(plan.mesh.axes)
    for entry in plan.placements:
        if entry.axis not in (DOMAIN, TENSOR):
            raise PlanError(
                f"the plan has placements along {entry.axis!r}; only {DOMAIN} and {TENSOR} have any.",
                fix=f"name them placements.{TENSOR} or placements.{DOMAIN}.",
            )
        if entry.axis not in known:
            raise PlanError(
                f"the plan has placements along {entry.axis}, which its mesh does not have.",
                fix=f"add {entry.axis} to the mesh, or drop placements.{entry.axis}.",
            )


def _choices(name: str) -> str:
    return f"{did_you_mean(name, NAMED)}choose one of {', '.join(NAMED)}, or give a .yaml file."
