"""A prepared DataLoader on one process gives what it gives without plait; the generators are then as they would be."""

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import plait
from plait.errors import DataError

pytestmark = pytest.mark.timeout(60)
NUM = 13
Pair = namedtuple("Pair", "x y")


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), index


class Views(Numbers):
    """Two views of a sample in a list, drawn from every generator."""

    def __getitem__(self, index: int) -> Any:
        return [torch.rand(2) + random.random() + numpy.random.rand() for _ in range(2)], index


class Asking(Numbers):
    """Says who reads it."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None and 0 <= info.id < info.num_workers == 2
        return torch.tensor([index]), self.mark


class Walked(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([Numbers()[index] for index in range(NUM)])


class Measured(Walked):
    def __len__(self) -> int:
        return NUM


class Eager(Sampler[int]):
    """Draws when it is asked for an iterator, not when that is asked for its first entry."""

    def __init__(self) -> None:
        pass

    def __len__(self) -> int:
        return NUM

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM).tolist())


class EagerBatches(Eager):
    batch_size = 4

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        ids = torch.randperm(NUM).tolist()
        return iter([ids[:3], ids[3:8], ids[8:]])


def ragged(samples: list[Any]) -> Any:
    """Draws; lists of tensors, of texts and of objects."""
    shift = random.random()
    return [x + shift for x, _ in samples], {"text": [str(y) for _, y in samples], "what": object}


def marked(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.mark = 7


MAKERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "workers stay": lambda: DataLoader(
        Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True, timeout=20
    ),
    "in order, workers stay": lambda: DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True),
    "workers begin": lambda: DataLoader(Asking(), 4, num_workers=2, worker_init_fn=marked),
    "eager batches, workers": lambda: DataLoader(Numbers(), batch_sampler=EagerBatches(), num_workers=2),
    "eager": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Eager(), 4, drop_last=True)),
    "views": lambda: DataLoader(Views(), 4, shuffle=True, drop_last=True),
    "ragged": lambda: DataLoader(Numbers(), 4, collate_fn=ragged, shuffle=True),
    "named": lambda: DataLoader(
        Numbers(), 4, collate_fn=lambda rows: Pair(torch.stack([x for x, _ in rows]), rows)
    ),
    "stream": lambda: DataLoader(Walked(), 4),
    "stream, whole batches": lambda: DataLoader(Walked(), 4, drop_last=True),
    "stream with a length": lambda: DataLoader(Measured(), 4),
}


def shown(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: shown(value) for key, value in batch.items()}
    return [shown(entry) for entry in batch] if isinstance(batch, list | tuple) else repr(batch)


def two_passes(loader: Any) -> list[Any]:
    """All batches, its length, and what the generators give then."""
    seen = [shown(batch) for _ in range(2) for batch in loader]
    try:
        length = len(loader)
    except TypeError:
        length = -1
    return [*seen, length, torch.rand(1).item(), random.random(), numpy.random.rand()]


def seeded(made: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    return two_passes(made())


@pytest.mark.parametrize("kind", MAKERS)
def test_batches_are_those_of_the_loader(kind: str) -> None:
    make = MAKERS[kind]
    assert seeded(lambda: plait.prepare(make())) == seeded(make)


def test_a_stream_is_not_read_by_workers_which_is_told() -> None:
    with pytest.warns(UserWarning, match=r"num_workers=2 read nothing, its worker_init_fn is not called"):
        plait.prepare(DataLoader(Walked(), 4, num_workers=2, worker_init_fn=marked))


def test_a_worker_that_cannot_begin_tells_why() -> None:
    def fails(number: int) -> None:
        raise ValueError(f"worker {number} has no file")

    with pytest.raises(DataError, match="worker 0 has no file"):
        next(iter(plait.prepare(DataLoader(Numbers(), 4, num_workers=1, worker_init_fn=fails))))


def test_a_stream_without_a_whole_batch_is_refused() -> None:
    with pytest.raises(DataError, match="13 samples in epoch 0, less than one batch of 20"):
        next(iter(plait.prepare(DataLoader(Walked(), 20, drop_last=True))))
