"""Which samples are in step k, and how a step is split.

Goes in: the number of samples, the batch, `accumulate`, the seed, maybe the samples' lengths. Comes out: the
sample ids of any step, computed from its number alone, so that a resumed run, or one with other ranks, sees the
same ids. Never reads a sample, never depends on the number of ranks, never drops or repeats a sample within an
epoch.
"""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import DataError, JobError

_STEPS_SORTED_TOGETHER = 50
"""As Hugging Face's LengthGroupedSampler: enough that lengths in a step are near, few enough that steps stay random."""


def split(size: int, parts: int) -> tuple[int, ...]:
    """Nearly equal consecutive sizes that sum to `size`, the larger ones first: split(5, 2) = (3, 2)."""
    small, num_larger = divmod(size, parts)
    return (small + 1,) * num_larger + (small,) * (parts - num_larger)


def micro_batch_sizes(num_ids: int, accumulate: int) -> tuple[int, ...]:
    """The sizes of a step's micro-batches; fewer than `accumulate` when there are not enough samples for one each."""
    return split(num_ids, min(accumulate, num_ids)) if num_ids else ()


def shares(size: int, ranks: int) -> tuple[int, ...]:
    """How many of a micro-batch's samples each rank gets: 0 for the last ones when there are too few."""
    return split(size, ranks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSamples:
    """The samples of one optimizer step."""

    step: int
    """Optimizer step, counted from 0 over the whole run."""
    epoch: int
    """Pass over the data, counted from 0."""
    ids: Tensor
    """Global sample ids in order: 1-D, int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The one global order of samples, from (seed, epoch)."""

    num_samples: int
    """Samples in the data."""
    batch: int
    """Samples per optimizer step, over all ranks."""
    accumulate: int = 1
    """Micro-batches per step."""
    seed: int = 0
    """Decides the permutation of every epoch."""
    shuffle: bool = True
    """False: the order in which the data is stored."""
    lengths: tuple[int, ...] | None = None
    """Of every sample, where samples of about the same length are to share a step."""
    _epochs: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(
                "the data has 0 samples.", fix="check the path or the filter that selects the samples."
            )
        if self.batch < 1 or not 1 <= self.accumulate <= self.batch:
            raise JobError(
                f"batch={self.batch}, accumulate={self.accumulate} cannot be split.",
                fix="choose batch >= 1 and accumulate from 1 to batch.",
            )

    @property
    def num_steps_per_epoch(self) -> int:
        """Optimizer steps in one pass; the last one may be smaller."""
        return -(-self.num_samples // self.batch)

    def at(self, step: int) -> StepSamples:
        """The samples of optimizer step `step`."""
        if step < 0:
            raise IndexError(f"step {step} is negative; steps count from 0")
        epoch, index = divmod(step, self.num_steps_per_epoch)
        begin = index * self.batch
        return StepSamples(step=step, epoch=epoch, ids=self.epoch_ids(epoch)[begin : begin + self.batch])

    def of_shares(self, step: int, ranks: int) -> list[list[int]]:
        """The ids of a step by share, as a `Loader` cuts them."""
        found: list[list[int]] = [[] for _ in range(ranks)]
        ids, begin = self.at(step).ids.tolist(), 0
        for size in micro_batch_sizes(len(ids), self.accumulate):
            for share, count in enumerate(shares(size, ranks)):
                found[share] += ids[begin : begin + count]
                begin += count
        return found

    def epoch_ids(self, epoch: int) -> Tensor:
        """All sample ids of an epoch, in order."""
        ids = self._epochs.get(epoch)
        if ids is None:
            ids = torch.arange(self.num_samples)
            if self.shuffle:
                ids = self._permutation(epoch) if self.lengths is None else self._grouped(epoch)
            self._epochs.clear()
            self._epochs[epoch] = ids
        return ids

    def _permutation(self, epoch: int) -> Tensor:
        return torch.randperm(self.num_samples, generator=self._generator(f"{self.seed}:{epoch}"))

    def _grouped(self, epoch: int) -> Tensor:
        """Sorted by length within every so many steps, then steps in any order; the last one stays the smaller one."""
        ids, lengths = self._permutation(epoch), torch.tensor(self.lengths)
        together = self.batch * _STEPS_SORTED_TOGETHER
        parts = [ids[begin : begin + together] for begin in range(0, self.num_samples, together)]
        ids = torch.cat([part[torch.argsort(lengths[part], stable=True)] for part in parts])
        num_full = self.num_samples // self.batch
        order = torch.randperm(num_full, generator=self._generator(f"{self.seed}:{epoch}:steps"))
        full = ids[: num_full * self.batch].view(num_full, self.batch)[order]
        return torch.cat([full.flatten(), ids[num_full * self.batch :]])

    def _generator(self, text: str) -> torch.Generator:
        # A hash, not seed + epoch: otherwise epoch 1 of seed 0 would be epoch 0 of seed 1.
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
