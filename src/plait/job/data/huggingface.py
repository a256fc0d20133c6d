"""Hugging Face datasets objects, recognized without importing that package.

Goes in: a Dataset or an IterableDataset of `datasets`. Comes out: a Source of dict batches with tensors
(whole numbers as int64, fractions as float32, as its torch format has them); a collate of the user's is given
rows as the dataset itself has them, as in a DataLoader. Never downloads anything.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError
from plait.job.batch import describe, no_rows, with_objects
from plait.job.data.source import Collate, Samples, Source, Stream


def is_huggingface(data: Any) -> bool:
    """Made by the `datasets` package."""
    return type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "with_format")


def huggingface(data: Any, collate: Collate | None) -> Source:
    """A Source over a dataset; a format or transform that the user has set is kept."""
    if isinstance(data, Mapping):
        raise DataError(
            f"the data is {describe(data)}: several splits.", fix="choose one, for example dataset['train']."
        )
    if not hasattr(data, "__len__"):
        formatted = data if collate is not None else data.with_format("torch")

        def restart(epoch: int) -> Any:
            if hasattr(formatted, "set_epoch"):
                formatted.set_epoch(epoch)
            return iter(formatted)

        def seek(first: int) -> Any:
            if hasattr(formatted, "set_epoch"):
                formatted.set_epoch(0)
            return iter(formatted.skip(first))

        return Stream(restart, collate, seek if hasattr(formatted, "skip") else None)
    kind = data.format["type"]
    if collate is not None or kind not in (None, "torch"):
        return Samples(data, collate)
    return Table(data if kind is not None else data.with_format("torch"))


class Table(Source):
    """A dataset in torch format: one read for all rows of a batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def num_samples(self) -> int:
        return len(self._dataset)

    def fetch(self, ids: Tensor) -> Any:
        if len(ids) == 0:
            return no_rows(self.fetch(torch.zeros(1, dtype=torch.int64)))
        batch: dict[str, Any] = with_objects(self._dataset[ids.tolist()])
        for name, column in batch.items():
            if isinstance(column, list) and any(isinstance(value, Tensor) for value in column):
                shapes = sorted({tuple(value.shape) for value in column})[:3]
                raise DataError(
                    f"column {name!r} has rows of different shapes ({', '.join(map(str, shapes))}).",
                    fix="pad it beforehand, or give collate=(list of samples) -> batch.",
                )
        return batch
