"""Copies of the data that leave out a part: k-fold cross-validation.

In: data, and which of how many parts is held out. Out: the ids of the samples to train on, or of those held out. Both
follow from the number of samples and a seed alone, so every process, plan and resume has the same.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from plait.errors import DataError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """The part of some data that is held out, or all but that part."""

    data: Any
    """Whose samples these are, as `Job.data` takes it."""
    number: int
    """Which part is held out, counted from 1."""
    folds: int
    """How many parts there are."""
    seed: int = 0
    """Which samples are in which part."""
    held_out: bool = False
    """Whether this is the part that is held out."""

    @classmethod
    def parse(cls, text: Any, data: Any) -> Self:
        """All but the part that `2/5` names: the second of five; `2/5:7` splits with the seed 7."""
        found = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})(?::([0-9]{1,9}))?", str(text))
        number, folds, seed = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
        if not 1 <= number <= folds or folds < 2:
            raise UsageError(
                f"fold={text} is no part of the data.",
                fix="write it like fold=2/5: hold out the second of five.",
            )
        return cls(data=data, number=number, folds=folds, seed=seed)

    def ids(self, num_samples: int | None) -> Tensor:
        """The samples of this copy, ascending."""
        if num_samples is None:
            raise DataError(
                "the data is a stream, whose samples have no numbers to make folds of.",
                fix="give a dataset with a length, or data and evaluate of your own for each fold.",
            )
        if num_samples < self.folds:
            raise DataError(f"{num_samples} samples make no {self.folds} folds.", fix="use fewer folds.")
        shuffled = torch.randperm(num_samples, generator=torch.Generator().manual_seed(self.seed))
        is_held_out = torch.zeros(num_samples, dtype=torch.bool)
        is_held_out[shuffled[self.number - 1 :: self.folds]] = True
        return (is_held_out if self.held_out else ~is_held_out).nonzero().flatten()
