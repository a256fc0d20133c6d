"""Any data a user may hand over, opened as a Source.

Goes in: `Job.data` or `Job.evaluate`, and the job's collate. Comes out: a Source. Never reads more than it
must to know the kind, never imports an optional package that the data does not need.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from plait.errors import DataError, PlaitError
from plait.job.batch import describe
from plait.job.data.columns import columns, is_array
from plait.job.data.fold import Fold
from plait.job.data.huggingface import huggingface, is_huggingface
from plait.job.data.parquet import parquet
from plait.job.data.source import Collate, Picked, Samples, Source, Stream
from plait.job.data.tar import is_tar, tar_shards
from plait.job.data.torch_loader import batch_of, collate_of, order_of
from plait.job.order import SampleOrder
from plait.job.origin import RAISED, called, where

__all__ = ["Source", "Stream", "open_data"]

_KINDS = (
    "a torch Dataset or DataLoader, tensors, a sequence of samples, an iterable, a Hugging Face dataset, a path to "
    "Parquet files or tar shards"
)
_FEW_COLUMNS = 4
"""A tuple of up to so many tensors is (inputs, targets, ...); a longer list is a list of samples."""


def open_data(
    data: Any, collate: Collate | None = None, *, skip_bad: int = 0, drop_last: bool = False
) -> Source:
    """The Source of this data: the thing itself, or a function without arguments that returns it.

    Up to `skip_bad` samples may be damaged; `drop_last` is for streams, other data has an order that knows it.
    """
    if isinstance(data, Fold):
        whole = open_data(data.data, collate, skip_bad=skip_bad)
        return Picked(whole, data.ids(whole.num_samples))
    made = _call(data) if _is_function(data) else data
    if isinstance(made, DataLoader) and made is not data:
        raise DataError(
            "the data function returns a DataLoader, which says more than which samples there are.",
            fix="give the DataLoader itself: data=loader.",
        )
    source = _open(made, data, collate)
    if source.damage is not None:
        source.damage.allowed = skip_bad
    if isinstance(source, Stream):
        source.drop_last = drop_last
    with called("len(data)", kind=DataError):
        empty = source.num_samples == 0
    if empty:
        raise DataError(
            f"the data ({type(made).__name__}) has 0 samples.",
            fix="check the path or the filter that selects them.",
        )
    return source


def _open(made: Any, given: Any, collate: Collate | None) -> Source:
    if isinstance(made, str | Path):
        return tar_shards(str(made), collate) if is_tar(str(made)) else parquet(Path(made), collate)
    if is_huggingface(made):
        return huggingface(made, collate)
    if isinstance(made, DataLoader):
        return _chosen(made, collate)
    if isinstance(made, TensorDataset) and type(made).__getitem__ is TensorDataset.__getitem__:
        return columns(made.tensors, collate)
    if type(made) is Subset:
        inner = _open(made.dataset, made.dataset, collate)
        return Picked(inner, torch.as_tensor(made.indices, dtype=torch.int64))
    if is_array(made) or _are_columns(made, collate):
        return columns(made, collate)
    if not isinstance(made, IterableDataset) and hasattr(made, "__len__") and hasattr(made, "__getitem__"):
        if isinstance(made, Mapping):
            raise DataError(
                f"the data is {describe(made)}.", fix="make every value a tensor with one row a sample."
            )
        return Samples(made, collate)
    if hasattr(made, "__iter__"):
        return Stream(_restarts(made, given), collate)
    raise DataError(f"the data is {describe(made)}.", fix=f"give {_KINDS}, or a function that returns one.")


def _chosen(loader: DataLoader[Any], collate: Collate | None) -> Source:
    """Of a DataLoader that is evaluated on: its samples, without those that its sampler leaves out."""
    inner = _open(loader.dataset, loader.dataset, collate_of(loader) or collate)
    said = order_of(loader) if inner.num_samples is not None else {}
    if not said.get("sampler") and not said.get("drop_last"):
        return inner
    assert inner.num_samples is not None
    order = SampleOrder(num_samples=inner.num_samples, batch=batch_of(loader), **said)
    return Picked(inner, order.epoch_ids(0))


def _is_function(data: Any) -> bool:
    if inspect.isroutine(data) or isinstance(data, type | functools.partial):
        return True
    is_data = any(hasattr(data, name) for name in ("__getitem__", "__iter__", "__len__"))
    return callable(data) and not is_data


def _call(function: Any) -> Any:
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        required = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):
        required = []
    if required:
        raise DataError(
            f"the data function {name} needs the arguments {', '.join(required)}.",
            fix="give one that needs none.",
        )
    try:
        return function()
    except PlaitError:
        raise
    except RAISED as error:
        line = where(error)
        raise DataError(
            f"the data function {name} failed{f' at {line}' if line else ''}: {type(error).__name__}: {error}.",
            fix="mend that function; it is called without arguments.",
        ) from error


def _are_columns(data: Any, collate: Collate | None) -> bool:
    """Whether a tuple, list or mapping holds columns rather than samples.

    A tuple that starts with an array is columns. A list may be either: arrays of one length that cannot be stacked
    (shapes or types differ) are columns unless many of them are to be collated, a long list is samples, and a short one
    that could be both is refused.
    """
    if isinstance(data, Mapping):
        return bool(data) and any(is_array(value) for value in data.values())
    if not isinstance(data, tuple | list) or not data or hasattr(data, "_fields") or not is_array(data[0]):
        return False
    if isinstance(data, tuple):
        return True
    if not all(is_array(item) and item.ndim for item in data):
        return False
    same_length = all(len(item) == len(data[0]) for item in data)
    stackable = same_length and all(
        item.shape == data[0].shape and item.dtype == data[0].dtype for item in data
    )
    if same_length and not stackable:  # images of three channels have one length too
        return collate is None or len(data) <= _FEW_COLUMNS
    if len(data) > _FEW_COLUMNS or (collate is not None and not same_length):
        return False
    shapes = ", ".join(str(tuple(item.shape)) for item in data)
    raise DataError(
        f"a list of {len(data)} arrays (shapes {shapes}) may mean {len(data)} samples or {len(data)} columns.",
        fix="write columns as a tuple (x, y), equally long; stack samples with torch.stack(samples).",
    )


def _restarts(made: Any, given: Any) -> Any:
    """A function epoch -> fresh iterator over the stream."""
    is_used_up = iter(made) is made if isinstance(made, Iterator) else False
    if is_used_up and not _is_function(given):
        raise DataError(
            f"the data is {describe(made)}, which can be read only once.",
            fix="give the function that makes it, so that every epoch and every rank can start anew.",
        )

    def restart(epoch: int) -> Iterator[Any]:
        fresh = _call(given) if is_used_up else made
        if hasattr(fresh, "set_epoch"):
            fresh.set_epoch(epoch)
        return iter(fresh)

    return restart
