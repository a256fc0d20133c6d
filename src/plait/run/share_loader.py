"""A DataLoader of a loop of the user's own, read by several ranks.

In: torch's DataLoader. Out: this rank's share of each of its batches, in the order that it would have alone, or in one
by a seed. Batches are those of one process: `batch_size` counts the samples of all ranks together.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from plait.job.batch import Objects, map_objects, map_tensors
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.data.share import LoadedStep
from plait.job.data.source import Stream
from plait.job.data.torch_loader import Drawn, Passes, batch_of, collate_of, num_batches, order_of
from plait.job.order import SampleOrder
from plait.run.wire.tell import tell
from plait.run.wrap import join_ranks
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
        self.batch_size, self._passes = batch_of(loader) * times, Passes(loader, times)
        """Samples of a batch, over all ranks."""
        self._source = open_data(loader.dataset, collate_of(loader), drop_last=loader.drop_last)
        self._order: SampleOrder | None = None
        if not isinstance(self._source, Stream):
            assert self._source.num_samples is not None
            self._order = SampleOrder(
                num_samples=self._source.num_samples,
                batch=self.batch_size,
                seed=seed or 0,
                **order_of(loader),
            )
        elif loader.num_workers and rank == 0:
            asked = ", its worker_init_fn is not called" if loader.worker_init_fn is not None else ""
            warnings.warn(
                f"num_workers={loader.num_workers} read nothing{asked}: the data is a stream, which each rank walks "
                "itself, in the order that it has without workers.",
                stacklevel=3,
            )
        self._draws, self._one_ahead = seed is None, one_ahead
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
            samples = len(self.dataset)  # type: ignore[arg-type]  # a stream may say it, else a TypeError
            return samples // self.batch_size if self.loader.drop_last else -(-samples // self.batch_size)
        return num_batches(self.loader, self.batch_size) if self._draws else self._order.num_batches_per_epoch

    def __getattr__(self, name: str) -> Any:
        """Whatever else loops ask a DataLoader."""
        return getattr(self.__dict__["loader"], name)

    @property
    def end_of_dataloader(self) -> bool:
        """Accelerate's name of `at_end`."""
        return self.at_end

    @property
    def total_batch_size(self) -> int:
        """Accelerate's name of `batch_size`."""
        return self.batch_size

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
        kept = within and self._drawn is not None and self._drawn.is_whole
        drawn = asdict(self._drawn) if kept and self._drawn is not None else None
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
        steps = iter(self._steps(epoch, skipped))
        for step in _one_ahead(steps) if self._one_ahead else steps:
            (share,) = step.micro_batches
            self.sizes, self.at_end = share.sizes, step.ends_epoch
            yield self._placed(share.batch)

    def _steps(self, epoch: int, skipped: int) -> Iterator[LoadedStep]:
        """The batches of a pass after the first ones, in the order of the data or in that which is drawn."""
        if self._order is None and self._draws:
            self._passes.begin()
            yield from self._read(None, epoch, skipped)
            return
        parts = self._passes.draw() if self._draws and self._drawn is None else None
        drawn = self._drawn or (_agreed(parts) if parts is not None else None)
        if drawn is None:
            yield from self._read(self._order, epoch, skipped)
            return
        assert self._order is not None
        while drawn is not None:
            self._drawn = drawn
            order = replace(self._order, seed=drawn.seed, sampler=drawn.entries)
            count = order.num_batches_per_epoch
            following = _agreed(parts) if parts is not None and not drawn.is_whole else None
            for step in self._read(order, 0, skipped) if skipped < count else ():
                yield replace(step, ends_epoch=step.ends_epoch and following is None)
            skipped, drawn = max(skipped - count, 0), following

    def _read(self, order: SampleOrder | None, epoch: int, skipped: int) -> Iterator[LoadedStep]:
        steps, workers = (order.num_batches_per_epoch if order is not None else 0), self.loader.num_workers
        with Loader(
            source=self._source, order=order, batch=self.batch_size, rank=self._rank, ranks=self._ranks,
            start_step=epoch * steps + skipped, stop_step=(epoch + 1) * steps if steps else None,
            epochs=None if steps else 1, workers=workers, worker_init=self.loader.worker_init_fn,
            depth=self.loader.prefetch_factor or (2 if workers else 0),
        ) as loaded:  # fmt: skip
            yield from loaded

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


def _agreed(parts: Iterator[Drawn]) -> Drawn | None:
    """What the first rank draws next: generators may differ. None at the end."""
    drawn = next(parts, None)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return drawn
    own = None if drawn is None else hashlib.sha256(drawn.ids.numpy().tobytes()).hexdigest()
    said = tell([own, drawn and drawn.seed, drawn and drawn.is_whole])
    if all(one == said[0] for one in said):
        return drawn
    first = tell(asdict(drawn) if drawn is not None and dist.get_rank() == 0 else None)[0]
    return Drawn(**first) if first is not None else None
