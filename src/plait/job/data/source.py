"""Samples that can be fetched by id, or only read in order.

Goes in: the user's dataset. Comes out: collated batches whose tensors have the samples on dim 0. Never
decides which samples, or in which order.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from plait.errors import DataError
from plait.job.batch import Objects, describe, no_rows, with_objects
from plait.job.data.damage import Damage
from plait.job.data.grouping import Grouping
from plait.job.data.trees import LOOKED_AT, Tree, fields, tree_fields, with_trees
from plait.job.generators import kept_generators
from plait.job.origin import RAISED, called
from plait.torch_private import pytree

Collate = Callable[[list[Any]], Any]
Seek = Callable[[int], Iterator[Any]]
"""Number of samples to go past -> the rest of the first epoch."""


class Source(ABC):
    """Where batches come from."""

    damage: Damage | None = None
    """Samples that could not be read; None where all are in memory."""
    dataset: Any = None
    """What the user gave, for workers to find."""
    before: Callable[[int], None] | None = None
    """Called before a sample is read, with its id."""

    def news(self) -> dict[int, str]:
        """Damaged samples that were met since this was asked last."""
        return self.damage.news() if self.damage is not None else {}

    def keep_to(self, ids: Tensor) -> None:  # noqa: B027 (what is in memory is never damaged)
        """Only these samples may ever be read, also in the place of a damaged one."""

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
        self._samples = self.dataset = samples
        self._collate = Grouping(collate) if collate is not None else None
        self._get_many = getattr(samples, "__getitems__", None)
        self._among: Sequence[int] | None = None
        self._empty: Any = None
        self._trees: frozenset[int] | None = None
        self.damage: Damage = Damage()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def keep_to(self, ids: Tensor) -> None:
        self._among = ids.tolist()

    def fetch(self, ids: Tensor) -> Any:
        if len(ids) == 0:
            if self._empty is None:
                with kept_generators():
                    self._empty = no_rows(self._collated([self._ids()[0]]))
            return self._empty
        return self._collated(ids.tolist())

    def _collated(self, ids: list[int]) -> Any:
        samples = self._read(ids)
        if self._collate is None:
            if self._trees is None and any(fields(sample, depth=1) for sample in samples):
                # a batch alone does not tell: its own may be alike by chance
                with kept_generators():
                    self._trees = tree_fields(self._read(list(self._ids()[:LOOKED_AT])))
            samples = [with_trees(sample, self._trees) for sample in samples]
        return collated(self._collate, samples)

    def _read(self, ids: list[int]) -> list[Any]:
        if self._get_many is not None:
            try:
                if self.before is not None:
                    self.before(ids[0])
                return list(self._get_many(ids))
            except RAISED as error:
                found = [self._one(index) for index in ids]
                if self.damage.allowed:
                    return found
                raise error  # each by itself can be read
        return [self._one(index) for index in ids]

    def _one(self, index: int) -> Any:
        """A sample; in place of a damaged one, where that is allowed, the next in the data, on whatever rank."""
        for number in self._from(index):
            try:
                if self.before is not None:
                    self.before(number)
                return self._samples[number]
            except RAISED as error:
                self.damage.take(number, error)
        raise DataError("no sample can be read.", fix="check the paths in the data.")

    def _from(self, index: int) -> Iterator[int]:
        """This sample, then those after it, then those before."""
        yield index
        ids = self._ids()
        start = ids.index(index)
        yield from itertools.chain(ids[start + 1 :], ids[:start])

    def _ids(self) -> Sequence[int]:
        return range(self.num_samples) if self._among is None else self._among


class Picked(Source):
    """Some samples of another source, as torch's Subset and random_split make them."""

    def __init__(self, source: Source, indices: Tensor) -> None:
        self._source = source
        self._indices = indices
        self.dataset = source.dataset
        self.damage = source.damage
        source.keep_to(indices)

    def keep_to(self, ids: Tensor) -> None:
        self._source.keep_to(self._indices[ids])

    @property
    def num_samples(self) -> int:
        return len(self._indices)

    def fetch(self, ids: Tensor) -> Any:
        self._source.before = self.before
        return self._source.fetch(self._indices[ids])


class Stream(Source):
    """An iterable without a known length: read in order, again from the start in the next epoch."""

    def __init__(
        self, restart: Callable[[int], Iterator[Any]], collate: Collate | None, seek: Seek | None = None
    ) -> None:
        self._restart = restart
        self._collate = Grouping(collate) if collate is not None else None
        self.seek = seek
        self.drop_last = False
        """Whether what does not fill the last batch of an epoch is left out."""
        self.damage: Damage = Damage()
        self._reader: Iterator[Any] | None = None
        self._position = 0
        self._empty: Any = None

    @property
    def num_samples(self) -> None:
        return None

    def samples(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """All samples of an epoch, from its start; every call reads anew. `first` > 0: where `seek` can, from there."""
        if first:
            assert self.seek is not None and epoch == 0
            return self._undamaged(self.seek(first), epoch, first)
        return self._undamaged(self._restart(epoch), epoch, 0)

    def _undamaged(self, samples: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        """The same samples without those that cannot be read; whoever fails for good is told of."""
        failed: DataError | None = None
        for position in itertools.count(first):
            try:
                sample = next(samples)
            except StopIteration:
                if failed is not None:
                    raise failed from failed.__cause__
                return
            except RAISED as error:
                what = self.damage.take(position, error, f" of epoch {epoch} of the stream")
                failed = DataError(
                    f"{what}; the stream ended with it.",
                    fix="let the data go on after a sample that fails: a generator that raises cannot.",
                )
                failed.__cause__ = error
                continue
            failed = None
            yield sample

    def limits(self, *, workers: int, start_step: int) -> list[str]:
        """What a user who wants workers, or to go on from a step, should know."""
        found = []
        if workers:
            found.append(
                f"workers={workers} read nothing: the data is a stream, which one thread of each rank walks."
            )
        if start_step and self.seek is None:
            found.append(
                f"the stream is read from its start up to step {start_step}: it cannot be entered there."
            )
        return found

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
        with called(f"collate(...) of {len(samples)} samples", kind=DataError):
            made = collate(samples)
        return pytree.know_dataclasses(with_objects(made))
    try:
        return with_objects(_gathered(samples))
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{len(samples)} samples cannot be put into one batch; the first is {describe(samples[0])}: {reason}.",
            fix="give collate=(list of samples) -> batch, which pads or converts them.",
        ) from error


def _gathered(samples: list[Any]) -> Any:
    """By torch's function, which knows tensors, arrays, numbers, text and what holds them; other objects in a list."""
    first = samples[0]
    try:
        return default_collate(samples)
    except TypeError:
        if isinstance(first, tuple | list) and all(len(sample) == len(first) for sample in samples):
            return [_gathered(list(column)) for column in zip(*samples, strict=True)]
        if isinstance(first, Mapping):
            return {key: _gathered([sample[key] for sample in samples]) for key in first}
        if isinstance(first, Tensor | tuple | list | int | float | str | bytes) or hasattr(
            first, "__array__"
        ):
            raise
        return Objects(sample.nested if isinstance(sample, Tree) else sample for sample in samples)
