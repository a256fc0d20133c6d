"""Tensors in memory, one row a sample: the fast path, without any Python per sample.

Goes in: one tensor, a tuple or a mapping of equally long ones. Comes out: a Source that picks rows. Never
copies the data beforehand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError
from plait.job.batch import describe, no_rows
from plait.job.data.source import Collate, Source


class Columns(Source):
    """Equally long tensors; `rebuild` puts the picked rows into the shape of a batch."""

    def __init__(
        self, tensors: Sequence[Tensor], rebuild: Callable[[list[Tensor]], Any], collate: Collate | None
    ) -> None:
        self._tensors = tuple(tensors)
        self._rebuild = rebuild
        self._collate = collate
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)

    @property
    def num_samples(self) -> int:
        return len(self._tensors[0])

    def fetch(self, ids: Tensor) -> Any:
        if self._collate is not None:
            chosen = ids.tolist() or [0]
            batch = self._collate(
                [self._rebuild([tensor[index] for tensor in self._tensors]) for index in chosen]
            )
            return batch if len(ids) else no_rows(batch)
        if self._on_cpu:
            return self._rebuild([tensor.index_select(0, ids) for tensor in self._tensors])
        return self._rebuild([tensor.index_select(0, ids.to(tensor.device)) for tensor in self._tensors])


def is_array(value: Any) -> bool:
    """A tensor or a numpy array."""
    return isinstance(value, Tensor) or (
        type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
    )


def columns(data: Any, collate: Collate | None) -> Columns:
    """A Source over one array, a tuple or list of them, or a mapping of them."""
    if isinstance(data, Mapping):
        names = list(data)
        return Columns(_checked(data), lambda rows: dict(zip(names, rows, strict=True)), collate)
    if is_array(data):
        return Columns(_checked({"data": data}), lambda rows: rows[0], collate)
    return Columns(_checked(dict(enumerate(data))), tuple, collate)


def _checked(named: Mapping[Any, Any]) -> list[Tensor]:
    if not named:
        raise DataError("the data has no columns.", fix="give at least one tensor.")
    for name, value in named.items():
        if not is_array(value):
            raise DataError(
                f"column {name!r} is {describe(value)}.", fix="make every column a tensor or numpy array."
            )
        if value.ndim == 0:
            raise DataError(
                f"column {name!r} is a single number.", fix="give tensors with the samples on dim 0."
            )
    lengths = {name: len(value) for name, value in named.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name!r}: {length}" for name, length in lengths.items())
        raise DataError(
            f"the columns have different numbers of rows ({listed}).", fix="give each sample one row in each."
        )
    return [tensor_of(name, value) for name, value in named.items()]


def tensor_of(name: Any, value: Any) -> Tensor:
    """The array as a tensor that shares its memory where it can."""
    try:
        tensor = (
            value
            if isinstance(value, Tensor)
            else torch.as_tensor(value if value.flags.writeable else value.copy())
        )
    except TypeError as error:
        raise DataError(
            f"column {name!r} holds {getattr(value, 'dtype', type(value))} values, which no tensor can hold.",
            fix="convert it to numbers first.",
        ) from error
    return tensor.detach()
