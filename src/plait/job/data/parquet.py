"""Parquet files.

Goes in: a file, or a folder of them. Comes out: a Source of dict batches, one tensor a column (whole
numbers as int64, fractions as the default float type, lists of equal length as further dims). The files are
read whole into memory. Never guesses: a column that no tensor can hold is named, unless the user's collate
takes care of it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError
from plait.job.data.columns import columns
from plait.job.data.source import Collate, Samples, Source


def parquet(path: Path, collate: Collate | None) -> Source:
    """A Source over the rows of a Parquet file or folder."""
    table = _read(_files(path))
    if table.num_rows == 0:
        raise DataError(f"{path} has 0 rows.", fix="check how the file was written.")
    converted = {name: _column(table.column(name)) for name in table.column_names}
    if collate is not None:
        return Samples(_Rows(converted), collate)
    for name, values in converted.items():
        if not isinstance(values, Tensor):
            raise DataError(
                f"column {name!r} of {path} ({table.column(name).type}) does not fit in one tensor.",
                fix="give collate=(list of dicts) -> batch, or write the file without that column.",
            )
    return columns(converted, None)


class _Rows:
    """The rows of a table as dicts."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(next(iter(self._values.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: values[index] for name, values in self._values.items()}


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise DataError(f"the folder {path} holds no .parquet file.", fix="name a folder that does.")
        return files
    if not path.exists():
        raise DataError(
            f"there is no file {path}.", fix="check the path; it is taken from the current folder."
        )
    if path.suffix != ".parquet":
        raise DataError(
            f"{path} is not a Parquet file.",
            fix="name a .parquet file, or give data as a function that reads yours.",
        )
    return [path]


def _read(files: list[Path]) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading {files[0].name} needs pyarrow.", fix="pip install pyarrow.") from error
    try:
        return pyarrow.concat_tables([pyarrow.parquet.read_table(file) for file in files])
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{files[0].parent} cannot be read as Parquet: {reason}", fix="write the files again."
        ) from error


def _column(column: Any) -> Tensor | list[Any]:
    """One tensor, or else a list with a tensor or a plain value a row."""
    import pyarrow

    array = column.combine_chunks()
    whole = _dense(array)
    if whole is not None:
        return whole
    rows = array.to_pylist()
    is_list = isinstance(array.type, pyarrow.ListType | pyarrow.LargeListType | pyarrow.FixedSizeListType)
    return [_row(row) for row in rows] if is_list else rows


def _dense(array: Any) -> Tensor | None:
    """The array as one tensor, if it has no gaps and no ragged rows."""
    import pyarrow

    if array.null_count:
        return None
    if isinstance(array, pyarrow.ListArray | pyarrow.LargeListArray | pyarrow.FixedSizeListArray):
        rows = array.flatten()
        inner = _dense(rows)
        lengths = set(array.value_lengths().to_numpy(zero_copy_only=False).tolist())
        if inner is None or len(lengths) != 1:
            return None
        return inner.reshape(len(array), *lengths, *inner.shape[1:])
    kind = array.type
    if pyarrow.types.is_boolean(kind) or pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind):
        return _standard(torch.from_numpy(array.to_numpy(zero_copy_only=False).copy()))
    return None


def _row(row: Any) -> Any:
    try:
        return _standard(torch.as_tensor(row))
    except (TypeError, ValueError, RuntimeError):
        return row


def _standard(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.get_default_dtype() if tensor.is_floating_point() else torch.int64)
