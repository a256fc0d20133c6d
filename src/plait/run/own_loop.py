"""What a hand-written loop is made of, prepared for several ranks: model, optimizer, DataLoader, scheduler.

In: torch's own objects. Out: the same loop runs on every rank: a DataLoader gives this rank's share of each of its
batches (which may be empty: then its tensors have 0 rows), the model's gradients are those of the whole batch. Batches
are those of one process: `batch_size` counts the samples of all ranks together.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.errors import PlanError, UsageError
from plait.job.batch import Objects, describe, map_objects, map_tensors
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.data.share import LoadedStep
from plait.job.data.source import Stream
from plait.job.data.torch_loader import Drawn, batch_of, collate_of, draw, num_batches, order_of
from plait.job.order import SampleOrder
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.rewrite.choose import settled_for
from plait.run.planned.model import Planned
from plait.run.start import launch as starting
from plait.run.start.launch import Seat, connect, disconnect
from plait.run.start.party import TIMEOUT_S, place_here
from plait.run.wire.tell import tell
from plait.run.wrap import Wrapped, join_ranks
from plait.torch_private import pytree


class ShareLoader:
    """This rank's share of every batch of a DataLoader; each pass over it is an epoch.

    Without a seed the order is the DataLoader's own: drawn when a pass begins, from the generators that it would draw
    from; the first rank's holds for all. Without workers a batch is read when it is asked for, as there.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: torch.device | None = None,
        times: int = 1,
        seed: int | None = None,
        place: tuple[int, int] | None = None,
        one_ahead: bool = False,
    ) -> None:
        """`times` as many samples are in a batch as the DataLoader says; `place`: which share of how many this is;
        `one_ahead`: a batch is read before the one before it is given."""
        rank, ranks = place or join_ranks(device or torch.device("cpu"))
        self.dataset, self.loader, self._device = loader.dataset, loader, device
        self.batch_size = batch_of(loader) * times
        """Samples of a batch, over all ranks."""
        self._source = open_data(loader.dataset, collate_of(loader))
        self._order: SampleOrder | None = None
        if not isinstance(self._source, Stream):
            assert self._source.num_samples is not None
            self._order = SampleOrder(
                num_samples=self._source.num_samples,
                batch=self.batch_size,
                seed=seed or 0,
                **order_of(loader),
            )
        self._draws, self._one_ahead = seed is None and self._order is not None, one_ahead
        self._rank, self._ranks = rank, ranks
        self.epoch = 0
        """The next pass."""
        self.sizes: tuple[int, ...] = ()
        """Samples of each rank in the batch that was given last."""
        self.at_end = False
        """Whether that was the last batch of its epoch."""
        self.is_read = False
        """Whether a pass over it is under way."""
        self._drawn: Drawn | None = None
        """The order of the pass that is under way, or that goes on next, where it was drawn."""
        self._skipped = 0

    def __len__(self) -> int:
        if self._order is None:
            raise TypeError("a stream has no length")
        return num_batches(self.loader, self.batch_size) if self._draws else self._order.num_batches_per_epoch

    def set_epoch(self, epoch: int) -> None:
        """Which pass the next one is."""
        self.epoch = epoch
        samplers: tuple[Any, ...] = (self.loader.batch_sampler, self.loader.sampler)
        for sampler in samplers if self._draws else ():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def skipping(self, batches: int) -> "ShareLoader":
        """The same; its next pass begins after so many batches, which are not read."""
        self._skipped = batches
        return self

    def state_dict(self) -> dict[str, Any]:
        """Which pass is under way, in which order; its position is the caller's to know."""
        within = self.is_read and not self.at_end
        drawn = asdict(self._drawn) if within and self._drawn is not None else None
        return {"epoch": self.epoch - within, "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass is that one."""
        self.set_epoch(state["epoch"])
        self._drawn = Drawn(**state["drawn"]) if state["drawn"] is not None else None

    def __iter__(self) -> Iterator[Any]:
        self.is_read = True
        try:
            yield from self._pass()
        finally:
            self.is_read, self._drawn = False, None

    def _pass(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        skipped, self._skipped = self._skipped, 0
        order = self._order if not self._draws else self._drawn_order()
        if order is not self._order:
            epoch = 0
        steps = order.num_batches_per_epoch if order is not None else 0
        workers = self.loader.num_workers
        with Loader(
            source=self._source, order=order, batch=self.batch_size, rank=self._rank, ranks=self._ranks,
            start_step=epoch * steps + skipped, stop_step=(epoch + 1) * steps if steps else None,
            epochs=None if steps else 1, workers=workers, depth=self.loader.prefetch_factor or (2 if workers else 0),
        ) as loaded:  # fmt: skip
            for step in _one_ahead(loaded) if self._one_ahead else loaded:
                (share,) = step.micro_batches
                self.sizes, self.at_end = share.sizes, step.ends_epoch
                yield self._placed(share.batch)

    def _drawn_order(self) -> SampleOrder:
        """The order of a pass: drawn now, or when the one that goes on began."""
        assert self._order is not None
        self._drawn = self._drawn or _agreed(draw(self.loader))
        if self._drawn is None:
            return self._order
        return replace(self._order, seed=self._drawn.seed, sampler=self._drawn.entries)

    def _placed(self, batch: Any) -> Any:
        if self._device is None or self._device.type == "cpu":
            return batch

        def placed(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, non_blocking=True)

        return map_tensors(placed, pytree.tree_map_only(Objects, partial(map_objects, placed), batch))


def _one_ahead(steps: Iterator[LoadedStep]) -> Iterator[LoadedStep]:
    for current in steps:
        for following in steps:
            yield current
            current = following
        yield current


def _agreed(drawn: Drawn | None) -> Drawn | None:
    """What the first rank drew: generators may differ. An order that is that of the data needs no words."""
    if drawn is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return drawn
    own = hashlib.sha256(drawn.ids.numpy().tobytes()).hexdigest()
    said = tell({"digest": own, "seed": drawn.seed})
    if all(one == said[0] for one in said):
        return drawn
    first = tell(asdict(drawn) if dist.get_rank() == 0 else None)[0]
    return Drawn(**first)


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
