"""The user's own sampler, asked for the order of an epoch.

Goes in: torch's Sampler or BatchSampler, any iterable of ids, or a function of the epoch's number. Comes out: the ids,
or those of every step. It is asked with all generators seeded from (seed, epoch), so that every rank, and a resumed
run, is told the same. Never asked more than once for an epoch that is still kept.
"""

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError, PlaitError
from plait.job.batch import describe
from plait.job.generators import kept_generators, number_of, seed_for
from plait.job.origin import RAISED, fix_of, told

Sampler = Iterable[Any] | Callable[[int], Iterable[Any]]
"""The ids of an epoch, or lists of them, one a step: torch's Sampler, or a function of the epoch's number."""

_MOST = 10**9
"""Entries of an epoch: as int64 8 GB."""


def sampled(sampler: Sampler, seed: int, epoch: int, num_samples: int) -> Tensor | list[Tensor]:
    """The ids of an epoch in order: one tensor, or one for every step where the sampler gives lists."""
    with kept_generators():
        seed_for(f"{seed}:{epoch}:sampler")
        try:
            entries = _entries(sampler, seed, epoch)
        except PlaitError:
            raise
        except RAISED as error:
            raise DataError(f"the sampler failed in epoch {epoch}{told(error)}", fix=fix_of(error)) from error
    if not entries:
        raise DataError(f"the sampler gives nothing in epoch {epoch}.", fix="let it give some samples.")
    if isinstance(entries[0], list | tuple):
        return [_checked(entry, num_samples) for entry in entries]
    return _checked(entries, num_samples)


def _entries(sampler: Any, seed: int, epoch: int) -> list[Any]:
    if not hasattr(sampler, "__iter__"):
        return list(sampler(epoch))
    if isinstance(sampler, Sized) and len(sampler) > _MOST:
        raise DataError(
            f"the sampler gives {len(sampler):,} samples or batches in an epoch, whose order would be drawn at once.",
            fix="let an epoch be one pass over the data (num_samples), and say with epochs= or steps= when to stop.",
        )
    several: list[Any] = [sampler, getattr(sampler, "sampler", None)]  # a BatchSampler has one
    for one in several:
        if hasattr(one, "set_epoch"):
            one.set_epoch(epoch)
        if isinstance(getattr(one, "generator", None), torch.Generator):
            # what it has drawn before must not matter
            one.generator.manual_seed(number_of(f"{seed}:{epoch}:sampler"))
    return list(sampler)


def _checked(entries: Any, num_samples: int) -> Tensor:
    try:
        ids = torch.tensor([int(entry) for entry in entries], dtype=torch.int64)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the sampler gives {describe(entries[0])}.", fix="give whole numbers, or lists of them."
        ) from error
    wrong = ids[(ids < 0) | (ids >= num_samples)]
    if len(wrong):
        raise DataError(
            f"the sampler names sample {int(wrong[0])}; the data has {num_samples}.",
            fix=f"name samples from 0 to {num_samples - 1}.",
        )
    return ids
