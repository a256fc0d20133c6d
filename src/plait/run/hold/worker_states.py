"""What single workers have that the mean of all does not show: kept in a checkpoint, given back where it fits.

In: a worker's model, optimizer and averages. Out: tensors by name (`worker 1/parameter/fc.weight`, `center/fc.weight`)
that lie beside the mean in a checkpoint. A run that resumes under the same rule with as many workers goes on exactly
as if it had not stopped; with another number it keeps the center and the outer momentum, and starts all workers from
the mean, with the optimizer state of the first. Any other plan takes just these.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import CheckpointError, RunError
from plait.files.document import Document, Format
from plait.files.shape import shaped
from plait.plan.plan import Plan
from plait.program.program import Spec
from plait.run.checkpoint.state import TrainingState, collect_optimizer, restore_optimizer
from plait.run.hold.averaging import Averaging
from plait.run.hold.state import ModelState
from plait.run.link.messages import pack, room, unpack
from plait.run.wire.tell import tell


class Workers(msgspec.Struct):
    """What a checkpoint says of workers that each have weights of their own."""

    rule: str
    """How they agree."""
    count: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    """Of those whose weights it holds."""
    numbers: list[dict[str, dict[str, int | float | bool | None]]]
    """What the optimizer of each keeps as plain numbers, by parameter and key."""


_FORMAT = Format(noun="workers of a checkpoint", error=CheckpointError, fix="resume from another checkpoint.")


def workers_of(saved: TrainingState) -> Workers | None:
    """Those of a checkpoint, all of them; None: it is of a plan under which all have the same weights."""
    about = saved.extra.get("workers")
    if about is None and not saved.beside:
        return None
    found = shaped(Document(values=about, where="the saved workers"), Workers, _FORMAT)
    held = {name.partition("/")[0] for name in saved.beside if name.startswith("worker ")}
    if held != {f"worker {rank}" for rank in range(found.count)} or len(found.numbers) != found.count:
        raise CheckpointError(
            f"the checkpoint is of {found.count} workers, and holds weights of {len(held)} and numbers of"
            f" {len(found.numbers)}",
            fix=_FORMAT.fix,
        )
    return found


def with_workers(
    saved: TrainingState, state: ModelState, averaging: Averaging, plan: Plan, rank: int
) -> TrainingState:
    """The state to be saved with those of all workers beside it; all of them must call it, rank 0's counts.

    `state` is the worker's own, not the mean of all.
    """
    if not plan.agreement.averages:
        return saved
    own, numbers = _own(state, averaging, plan)
    told, tensors = _gather(own, numbers, rank, plan.mesh.size, state.device)
    beside = {
        f"worker {number}/{name}": t for number, found in enumerate(tensors) for name, t in found.items()
    }
    beside |= {f"center/{name}": tensor for name, tensor in averaging.center.items()}
    if plan.agreement.mix == "outer":
        beside |= {f"velocity/{name}": tensor for name, tensor in averaging.velocity.items()}
    extra = saved.extra | {"workers": {"rule": plan.sync.rule, "count": plan.mesh.size, "numbers": told}}
    return replace(saved, beside=beside, extra=extra)


def of_one(saved: TrainingState, averaging: Averaging, plan: Plan) -> TrainingState:
    """What one worker alone knows of all, right after they have met: the mean or the center, and what goes with it."""
    beside = {f"center/{name}": tensor for name, tensor in averaging.center.items()}
    parameters = saved.parameters
    if plan.agreement.mix == "elastic":
        parameters = {name: averaging.center.get(name, tensor) for name, tensor in parameters.items()}
    elif plan.agreement.mix == "outer":
        beside |= {f"velocity/{name}": tensor for name, tensor in averaging.velocity.items()}
    extra = saved.extra | {"workers": {"rule": plan.sync.rule, "count": 0, "numbers": []}}
    return replace(saved, parameters=parameters, beside=beside, extra=extra)


def restore_workers(
    saved: TrainingState, state: ModelState, averaging: Averaging, plan: Plan, rank: int
) -> None:
    """Give this worker back what it had; `state` has been loaded with the mean."""
    about = workers_of(saved)
    if not plan.agreement.averages or about is None or about.rule != plan.sync.rule:
        return
    _copy(averaging.center, saved.beside, "center/")
    if plan.agreement.mix == "outer":
        _copy(averaging.velocity, saved.beside, "velocity/")
    if about.count != plan.mesh.size:
        return
    own = _within(saved.beside, f"worker {rank}/")
    _copy({name: p.detach() for name, p in state.named}, own, "parameter/")
    _copy(state.buffers, own, "buffer/")
    if plan.agreement.mix == "elastic":
        _copy(averaging.velocity, own, "velocity/")
    tensors: dict[str, dict[str, Tensor]] = {}
    for joined, tensor in _within(own, "optimizer/").items():
        name, _, key = joined.rpartition("/")
        tensors.setdefault(name, {})[key] = tensor
    optimizer = replace(saved.optimizer, tensors=tensors, values=about.numbers[rank])
    restore_optimizer(state.optimizer, state.named, optimizer)


def _own(state: ModelState, averaging: Averaging, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A worker's tensors, and what its optimizer keeps as plain numbers."""
    optimizer = collect_optimizer(state.optimizer, state.named)
    own = {f"parameter/{name}": p.detach() for name, p in state.named}
    own |= {f"buffer/{name}": buffer for name, buffer in state.buffers.items()}
    own |= {f"optimizer/{n}/{k}": t for n, entries in optimizer.tensors.items() for k, t in entries.items()}
    if plan.agreement.mix == "elastic":
        own |= {f"velocity/{name}": tensor for name, tensor in averaging.velocity.items()}
    return own, optimizer.values


def _gather(
    own: Mapping[str, Tensor], numbers: dict[str, Any], rank: int, ranks: int, device: torch.device
) -> tuple[list[dict[str, Any]], list[dict[str, Tensor]]]:
    """(numbers, tensors) of all workers, at rank 0; one message from each of the others."""
    if ranks == 1:
        return [numbers], [dict(own)]
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    placed = {name: tensor.to(place) for name, tensor in own.items()}
    values = {n: Spec(kind="parameter", shape=tuple(t.shape), dtype=t.dtype) for n, t in placed.items()}
    shapes = {name: [str(value.dtype), list(value.shape)] for name, value in values.items()}
    told = tell({"tensors": shapes, "numbers": numbers})
    if rank > 0:
        dist.send(pack(list(placed.values()), list(values.values())), 0)
        return [], []
    found = [placed]
    for other in range(1, ranks):
        wanted = {name: _spec(*about) for name, about in told[other]["tensors"].items()}
        flat = room(list(wanted.values()), place)
        dist.recv(flat, other)
        found.append(dict(zip(wanted, unpack(flat, list(wanted.values())), strict=True)))
    return [entry["numbers"] for entry in told], found


def _spec(dtype: str, shape: list[int]) -> Spec:
    """A tensor as another worker tells of it."""
    known = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(known, torch.dtype) or not all(
        isinstance(extent, int) and extent >= 0 for extent in shape
    ):
        raise RunError(f"a worker tells of a tensor of type {dtype!r} and shape {shape}.")
    return Spec(kind="parameter", shape=tuple(shape), dtype=known)


def _within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], beside: Mapping[str, Tensor], prefix: str) -> None:
    """Each from what lies beside the model; all of them, or an error."""
    sources = _within(beside, prefix)
    for name in targets.keys() | sources.keys():
        mine, theirs = (tuple(of[name].shape) if name in of else "none" for of in (targets, sources))
        if mine != theirs:
            raise CheckpointError(
                f"{prefix}{name!r} of the workers differs: the model has {mine}, the checkpoint has {theirs}",
                fix=_FORMAT.fix,
            )
        targets[name].copy_(sources[name])
