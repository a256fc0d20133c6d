"""What a hand-written loop is made of, prepared for several ranks: model, optimizer, DataLoader, scheduler.

In: torch's own objects. Out: the same loop runs on every rank: a DataLoader gives this rank's share of each of its
batches (which may be empty: then its tensors have 0 rows), the model's gradients are those of the whole batch. Batches
are those of one process: `batch_size` counts the samples of all ranks together.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.errors import PlanError, UsageError
from plait.job.batch import describe
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.rewrite.choose import settled_for
from plait.run.planned.model import Planned
from plait.run.share_loader import ShareLoader
from plait.run.start import launch as starting
from plait.run.start.launch import Seat, connect, disconnect
from plait.run.start.party import TIMEOUT_S, place_here
from plait.run.wire.tell import tell
from plait.run.wrap import Wrapped, join_ranks


def wrap(model: nn.Module) -> Wrapped:
    """What `DistributedDataParallel(model)` is, exact also where ranks have different numbers of samples."""
    return model if isinstance(model, Wrapped) else Wrapped(model)


def prepare(
    *parts: Any,
    plan: str | Path | Plan = "ddp",
    seed: int | None = None,
    micro_batches: int = 1,
    settings: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Any:
    """Models, optimizers, DataLoaders and schedulers of a loop of the user's own, in the order in which they are given.

    `seed` decides the order of DataLoaders that shuffle; without it, it is the one that they draw themselves. Under
    plans other than ddp one model and its optimizer are given together: calls of the model are recorded, and
    `loss.backward()` runs what was recorded as one step of the plan, in `micro_batches` slices.
    """
    device = next(
        (p.device for part in parts if isinstance(part, nn.Module) for p in part.parameters()), None
    )
    rank, ranks = join_ranks(device or torch.device("cpu"))
    chosen = settled_for(ranks, resolve(plan, ranks if not isinstance(plan, Plan) else None, settings, mesh))
    place = (rank, ranks)
    planned: Planned | None = None
    if chosen.name != "ddp":
        planned = _planned(chosen, parts, ranks, seed=seed or 0, micro_batches=micro_batches)
        place = (chosen.data_coordinate(rank), chosen.data_ranks)
    elif micro_batches != 1:
        raise PlanError(
            f"micro_batches={micro_batches} slices what a plan runs as one step; under ddp the loop does.",
            fix="leave it out, or accumulate in the loop.",
        )

    def prepared(part: Any) -> Any:
        if isinstance(part, nn.Module):
            return planned if planned is not None else wrap(part)
        if isinstance(part, DataLoader):
            return ShareLoader(part, device=device, seed=seed, place=place)
        if isinstance(part, ShareLoader | torch.optim.Optimizer) or hasattr(part, "get_last_lr"):
            return part
        raise UsageError(
            f"{describe(part)} cannot be prepared.",
            fix="give models, optimizers, DataLoaders and schedulers.",
        )

    made = tuple(map(prepared, parts))
    return made[0] if len(made) == 1 else made


def _planned(plan: Plan, parts: Sequence[Any], ranks: int, *, seed: int, micro_batches: int) -> Planned:
    models = [part for part in parts if isinstance(part, nn.Module)]
    optimizers = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) != 1:
        raise UsageError(
            f"plan {plan.name} decides about a whole step, of one model and one optimizer; {len(models)} and "
            f"{len(optimizers)} were given.",
            fix="give both to the same call of prepare, made before it from the same module; or use plan='ddp'.",
        )
    if isinstance(models[0], Wrapped | Planned):
        raise UsageError("the model was prepared before.", fix="prepare it once, under one plan.")
    if plan.ranks != ranks:
        raise PlanError(
            f"the plan is for {plan.ranks} ranks, but {ranks} processes were started.",
            fix=f"start {plan.ranks} processes, or drop the mesh from the plan.",
        )
    return Planned(models[0], optimizers[0], plan, seed=seed, micro_batches=micro_batches)


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all ranks one after the other along dim 0, in which they may differ."""
    own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own.clone()
    counts = [int(count) for count in tell(own.shape[0])]
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: own.shape[0]] = own
    found = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        dist.all_gather(found, padded)
    return torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])


def padded(tensor: Tensor, dim: int, value: int, first: bool) -> Tensor:
    """A tensor of the longest rank's size along `dim`."""
    if not -tensor.dim() <= dim < tensor.dim() or not dist.is_initialized():
        return tensor
    missing = max(tell(tensor.shape[dim])) - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    more = tensor.new_full(shape, value)
    return torch.cat([more, tensor] if first else [tensor, more], dim)


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Call `function(*args)` in so many processes; what each returned, by rank, as JSON has it.

    Where torchrun, srun or mpirun started this process among others, it is a rank already, and calls it once.
    """
    if place_here() is not None or dist.is_initialized():
        return [function(*args)]

    def main(seat: Seat) -> Any:
        if seat.ranks > 1:
            connect(seat, timeout_s=TIMEOUT_S)
        try:
            return function(*args)
        finally:
            disconnect()

    return starting.launch(main, ranks=ranks)
