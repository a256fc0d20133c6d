"""torch's DataLoader as a data source: what it says about the data, in the words of a job.

Goes in: a DataLoader. Comes out: its dataset, and batch, order, collate, workers and drop_last; where a loop of the
user's own reads it, the order that it draws for a pass. Never iterates over it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import default_collate
from torch.utils.data.distributed import DistributedSampler

from plait.errors import DataError
from plait.job.generators import number_of

_MOST_BATCHES = 4096
"""Of a pass whose order is drawn at once."""


def loader_fields(loader: DataLoader[Any], job: Any) -> dict[str, Any]:
    """The fields of a job that a DataLoader answers, where the job leaves them as they are."""
    if loader.worker_init_fn is not None:
        raise DataError(
            "the DataLoader has a worker_init_fn, which is not called here: draws in a worker are seeded by sample.",
            fix="leave it out; open files in the dataset when the first sample is read.",
        )
    found: dict[str, Any] = {"data": loader.dataset}
    if job.batch == 0:
        found["batch"] = batch_of(loader)
    if job.collate is None:
        found["collate"] = collate_of(loader)
    if job.workers == 0:
        found["workers"] = loader.num_workers
    if loader.prefetch_factor is not None:
        found["prefetch"] = loader.prefetch_factor
    if isinstance(loader.dataset, IterableDataset):
        return found | {"drop_last": loader.drop_last}
    if job.sampler is None and job.lengths is None:
        found |= order_of(loader)
    return found


def batch_of(loader: DataLoader[Any]) -> int:
    """Samples of a batch, at most."""
    if loader.batch_size is not None:
        return int(loader.batch_size)
    size = getattr(loader.batch_sampler, "batch_size", None)
    if isinstance(size, int) and size >= 1:
        return size
    raise DataError(
        "the DataLoader does not say how many samples a batch has.",
        fix="give batch= to the job; with batch_size=None, give the dataset itself, or, in a loop of your own, do not "
        "prepare the DataLoader and let each rank read a part.",
    )


def collate_of(loader: DataLoader[Any]) -> Any:
    """The user's function; None where it is torch's own."""
    if loader.batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None: its dataset gives batches, and plait puts samples together.",
            fix="give a DataLoader with a batch_size over single samples.",
        )
    return None if loader.collate_fn is default_collate else loader.collate_fn


def order_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """`shuffle`, `sampler` and `drop_last`."""
    batches = loader.batch_sampler
    inner = getattr(batches, "sampler", None)
    if isinstance(inner, DistributedSampler) and inner.num_replicas > 1:
        raise DataError(
            f"the DataLoader has a DistributedSampler, which gives this rank 1 of {inner.num_replicas} parts of the "
            "data; they would be cut among the ranks once more.",
            fix="leave the sampler out (shuffle=True), with batch_size= of all ranks together; or do not prepare the "
            "DataLoader, only the model.",
        )
    if batches is None or type(batches) is not BatchSampler:
        return {"sampler": batches}
    kept, sampler = {"drop_last": batches.drop_last}, batches.sampler
    if type(sampler) is SequentialSampler:
        return kept | {"shuffle": False}
    if isinstance(sampler, RandomSampler) and type(sampler) is RandomSampler:
        whole = sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
        if whole and not sampler.replacement:
            return kept
    return kept | {"sampler": sampler}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What a DataLoader draws for a pass over its data, or for a part of one that has very many batches."""

    seed: int
    """Of what its workers draw."""
    ids: Tensor
    """All samples in order: 1-D, int64."""
    sizes: Tensor | None
    """Of its batches, where a sampler of the user's says what is in each."""
    is_whole: bool
    """Whether this is all of the pass."""

    @property
    def entries(self) -> list[Any]:
        """The ids, or those of every batch."""
        if self.sizes is None:
            return self.ids.tolist()
        return [part.tolist() for part in torch.split(self.ids, self.sizes.tolist())]


class Passes:
    """The passes over a DataLoader, one after the other."""

    def __init__(self, loader: DataLoader[Any], times: int = 1) -> None:
        """`times` batches are one here."""
        self._loader, self._most = loader, _MOST_BATCHES * times
        self._kept: int | None = None
        """The seed of workers that stay from pass to pass, which is drawn once."""
        self._num_drawn = 0

    def draw(self) -> Iterator[Drawn] | None:
        """The next pass, from the generators that the DataLoader would ask, in the same order; None where it is that
        of the data. It comes in parts, each when it is needed: a sampler may have no end."""
        batches: Any = self._loader.batch_sampler
        assert batches is not None, "collate_of refuses a DataLoader of batches"
        begun, seed = self.begin()
        plain = type(batches) is BatchSampler
        if plain and type(batches.sampler) is SequentialSampler:
            return None
        return _parts(begun, seed, plain, self._most)

    def begin(self) -> tuple[Iterator[Any], int]:
        """The next pass of its batch sampler, and the seed of its workers; of a stream nothing else is drawn."""
        loader, batches = self._loader, self._loader.batch_sampler
        begun: Iterator[Any] = iter(
            batches if batches is not None else ()
        )  # a sampler may draw here, as in torch's own iterator
        seed = self._kept
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator))
            if loader.num_workers:
                begun = iter(
                    batches if batches is not None else ()
                )  # there it begins once more for its workers
            self._kept = seed if loader.persistent_workers else None
        elif loader.num_workers:
            seed = number_of(f"{seed} in pass {self._num_drawn}")
        self._num_drawn += 1
        return begun, seed


def _parts(begun: Iterator[Any], seed: int, plain: bool, most: int) -> Iterator[Drawn]:
    following = [list(batch) for batch in itertools.islice(begun, most)]
    for number in itertools.count():
        entries, following = following, [list(batch) for batch in itertools.islice(begun, most)]
        ids = torch.tensor([int(sample) for batch in entries for sample in batch], dtype=torch.int64)
        sizes = None if plain else torch.tensor([len(batch) for batch in entries])
        yield Drawn(seed=seed + number, ids=ids, sizes=sizes, is_whole=not number and not following)
        if not following:
            return


def num_batches(loader: DataLoader[Any], batch: int) -> int:
    """Batches of a pass where the usual ones have so many samples; a TypeError where the sampler does not say."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return len(batches)  # type: ignore[arg-type]
    samples = len(batches.sampler)  # type: ignore[arg-type]
    return samples // batch if batches.drop_last else -(-samples // batch)
