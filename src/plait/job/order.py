"""Which samples are in step k, and how a step is split.

Goes in: the number of samples, the batch, `accumulate`, the seed, maybe the samples' lengths or a sampler of the
user's. Comes out: the sample ids of any step, computed from its number alone, so that a resumed run, or one with other
ranks, sees the same ids. Never reads a sample, never depends on the number of ranks, never drops or repeats a sample
within an epoch, unless a sampler or `drop_last` asks for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import DataError, JobError
from plait.job.generators import number_of
from plait.job.sampler import Sampler, sampled
from plait.latest import Latest

_STEPS_SORTED_TOGETHER = 50
"""As Hugging Face's LengthGroupedSampler: enough that lengths in a step are near, few enough that steps stay random."""


_EPOCHS_KEPT = 6
"""Orders that are kept: of short epochs, several are read ahead of."""


def split(size: int, parts: int) -> tuple[int, ...]:
    """Nearly equal consecutive sizes that sum to `size`, the larger ones first: split(5, 2) = (3, 2)."""
    small, num_larger = divmod(size, parts)
    return (small + 1,) * num_larger + (small,) * (parts - num_larger)


def micro_batch_sizes(num_ids: int, accumulate: int) -> tuple[int, ...]:
    """The sizes of a step's micro-batches; fewer than `accumulate` when there are not enough samples for one each."""
    return split(num_ids, min(accumulate, num_ids)) if num_ids else ()


def balanced(ids: Sequence[int], work: Sequence[int]) -> list[int]:
    """Samples in an order in which shares of as many, one after the other, have about the same work.

    By halves, and halves of those, so that it holds for any number of ranks: the larger first, to the lighter side.
    """
    ordered = sorted(ids, key=lambda each: -work[each])
    if len(ordered) < 2:
        return ordered
    room, sums = list(split(len(ordered), 2)), [0, 0]
    sides: tuple[list[int], list[int]] = ([], [])
    for each in ordered:
        side = min((side for side in (0, 1) if room[side]), key=sums.__getitem__)
        sides[side].append(each)
        sums[side] += work[each]
        room[side] -= 1
    return [*balanced(sides[0], work), *balanced(sides[1], work)]


def shares(size: int, ranks: int) -> tuple[int, ...]:
    """How many of a micro-batch's samples each rank gets: 0 for the last ones when there are too few."""
    return split(size, ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Which batch of the order a step has: its own, or that of the step before."""

    own: tuple[bool, ...] = (True,)
    """Of the steps of a round, over and over: whether it has a batch of its own. The first one has."""

    def batch(self, step: int) -> int:
        """The number of a step's batch."""
        rounds, place = divmod(step, len(self.own))
        return rounds * sum(self.own) + sum(self.own[: place + 1]) - 1

    def first_step(self, batch: int) -> int:
        """The step for which a batch is drawn."""
        rounds, place = divmod(batch, sum(self.own))
        drawing = [step for step, own in enumerate(self.own) if own]
        return rounds * len(self.own) + drawing[place]


EACH = Draws()
"""Every step has its own."""


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
    work: tuple[int, ...] | None = None
    """Of every sample, where shares of a micro-batch are to have about the same: orders the samples within it."""
    sampler: Sampler | None = None
    """Says the order instead; called with all generators seeded from (seed, epoch)."""
    drop_last: bool = False
    """Leave out the samples of an epoch that do not fill a step."""
    draws: Draws = EACH
    """Which batch a step has."""
    _epochs: Latest[int, Tensor | list[Tensor]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kept = 1 if self.sampler is None else _EPOCHS_KEPT
        object.__setattr__(self, "_epochs", Latest[int, Tensor | list[Tensor]](kept))
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
    def num_batches_per_epoch(self) -> int:
        """Batches in one pass, of which the last one may be smaller; where each step has its own, steps."""
        return self._num_steps(self._epoch(0)) if self.sampler is not None else self._full(self.num_samples)

    def first_step(self, epoch: int) -> int:
        """The first step of a pass: so many are in all before it."""
        return self.draws.first_step(epoch * self.num_batches_per_epoch)

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """How many samples steps have; of a user's steps, those of the first epoch."""
        first = self._epoch(0) if self.sampler is not None else range(self.num_samples)
        if isinstance(first, list):
            return tuple(dict.fromkeys(map(len, first)))
        rest = 0 if self.drop_last else len(first) % self.batch
        return (min(self.batch, len(first)), *((rest,) if rest and len(first) > self.batch else ()))

    def at(self, step: int) -> StepSamples:
        """The samples of optimizer step `step`."""
        if step < 0:
            raise IndexError(f"step {step} is negative; steps count from 0")
        epoch, index = divmod(self.draws.batch(step), self.num_batches_per_epoch)
        found = self._epoch(epoch)
        if self._num_steps(found) != self.num_batches_per_epoch:
            raise DataError(
                f"the sampler gives {self._num_steps(found)} steps in epoch {epoch}, and "
                f"{self.num_batches_per_epoch} in the first.",
                fix="let it give as many in every epoch.",
            )
        begin = index * self.batch
        ids = found[index] if isinstance(found, list) else found[begin : begin + self.batch]
        if self.work is not None:
            parts = torch.split(ids, list(micro_batch_sizes(len(ids), self.accumulate)))
            ids = torch.tensor([each for part in parts for each in balanced(part.tolist(), self.work)])
        return StepSamples(step=step, epoch=epoch, ids=ids)

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
        found = self._epoch(epoch)
        return torch.cat(found) if isinstance(found, list) else found[: self._full(len(found)) * self.batch]

    def _num_steps(self, epoch: Tensor | list[Tensor]) -> int:
        return len(epoch) if isinstance(epoch, list) else self._full(len(epoch))

    def _full(self, samples: int) -> int:
        return samples // self.batch if self.drop_last else -(-samples // self.batch)

    def _epoch(self, epoch: int) -> Tensor | list[Tensor]:
        """The ids of an epoch; of a sampler that says what is in a step, those of every step."""
        ids = self._epochs.get(epoch)
        if ids is None:
            if self.sampler is not None:
                ids = sampled(self.sampler, self.seed, epoch, self.num_samples)
            elif not self.shuffle:
                ids = torch.arange(self.num_samples)
            else:
                ids = self._permutation(epoch) if self.lengths is None else self._grouped(epoch)
            self._epochs.put(epoch, ids)
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
        return torch.Generator().manual_seed(number_of(text))
