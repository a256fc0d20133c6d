"""Samples that can be fetched by id, or only read in order.

Goes in: the user's dataset. Comes out: collated batches whose tensors have the samples on dim 0. Never
decides which samples, or in which order.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from plait.errors import DataError
from plait.job.batch import describe, no_rows

Collate = Callable[[list[Any]], Any]


class Source(ABC):
    """Where batches come from."""

    @property
    @abstractmethod
    def num_samples(self) -> int | None:
        """How many samples there are; None when only the end of the stream tells."""

    @abstractmethod
    def fetch(self, ids: Tensor) -> Any:
        """The batch of these samples (1-D int64, may be empty: then every tensor has 0 rows)."""


class Samples(Source):
    """Anything with __len__ and __getitem__: read sample by sample, then collated."""

    def __init__(self, samples: Any, collate: Collate | None) -> None:
        self._samples = samples
        self._collate = collate
        self._get_many = getattr(samples, "__getitems__", None)
        self._empty: Any = None

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def fetch(self, ids: Tensor) -> Any:
        if len(ids) == 0:
            if self._empty is None:
                self._empty = no_rows(collated(self._collate, self._read([0])))
            return self._empty
        return collated(self._collate, self._read(ids.tolist()))

    def _read(self, ids: list[int]) -> list[Any]:
        if self._get_many is not None:
            return list(self._get_many(ids))
        samples = self._samples
        return [samples[index] for index in ids]


class Picked(Source):
    """Some samples of another source, as torch's Subset and random_split make them."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source = source
        self._indices = indices

    @property
    def num_samples(self) -> int:
        return len(self._indices)

    def fetch(self, ids: Tensor) -> Any:
        return self._source.fetch(self._indices[ids])


class Stream(Source):
    """An iterable without a known length: read in order, again from the start in the next epoch."""

    def __init__(self, restart: Callable[[int], Iterator[Any]], collate: Collate | None) -> None:
        self._restart = restart
        self._collate = collate
        self._reader: Iterator[Any] | None = None
        self._position = 0
        self._empty: Any = None

    @property
    def num_samples(self) -> None:
        return None

    def samples(self, epoch: int) -> Iterator[Any]:
        """All samples of an epoch, from its start; every call reads anew."""
        return self._restart(epoch)

    def collate(self, samples: Sequence[Any]) -> Any:
        """The batch of these samples; with none, that of the stream's first sample cut to 0 rows."""
        if samples:
            return collated(self._collate, list(samples))
        if self._empty is None:
            self._empty = no_rows(collated(self._collate, self._first()))
        return self._empty

    def fetch(self, ids: Tensor) -> Any:
        """Ids are positions in the first epoch. Reading forward is cheap; going back reads from the start."""
        found = []
        for index in ids.tolist():
            if self._reader is None or index < self._position:
                self._reader, self._position = self.samples(0), 0
            for sample in self._reader:
                self._position += 1
                if self._position > index:
                    found.append(sample)
                    break
            else:
                raise DataError(
                    f"sample {index} was asked for; the stream has {self._position}.",
                    fix="use a smaller batch.",
                )
        return self.collate(found)

    def _first(self) -> list[Any]:
        for sample in self.samples(0):
            return [sample]
        raise DataError(
            "the stream has 0 samples.", fix="check the path or the filter that selects the samples."
        )


def collated(collate: Collate | None, samples: list[Any]) -> Any:
    """One batch from these samples, by the user's function or torch's."""
    if collate is not None:
        return collate(samples)
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{len(samples)} samples cannot be put into one batch; the first is {describe(samples[0])}: {reason}.",
            fix="give collate=(list of samples) -> batch, which pads or converts them.",
        ) from error
