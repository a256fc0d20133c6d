"""Tar shards in WebDataset's layout: files of one sample share the name up to its first dot.

Goes in: `train.tar`, a folder of them, or `train-{000..012}.tar`. Comes out: a Source that fetches by id, so that it is
shuffled, cut, read by workers and resumed like any other. A sample is a dict: `__key__`, and by extension text (txt),
numbers (cls, index), JSON values, arrays (npy), else bytes. Only headers are read beforehand. Never unpickles anything.
"""

import io
import itertools
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from plait.errors import DataError
from plait.job.data.source import Collate, Samples, Source

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_KEY = "__key__"


def is_tar(path: str) -> bool:
    """Whether a path names tar shards."""
    return path.endswith(".tar") or (os.path.isdir(path) and any(Path(path).glob("*.tar")))


def tar_shards(path: str, collate: Collate | None) -> Source:
    """A Source over the samples of tar files."""
    return Samples(_Shards(_files(path)), collate)


def _files(path: str) -> list[Path]:
    if os.path.isdir(path):
        return sorted(Path(path).glob("*.tar"))
    ranges = [(first, int(first), int(last)) for first, last in _RANGE.findall(path)]
    numbers = [[f"{at:0{len(text)}d}" for at in range(first, last + 1)] for text, first, last in ranges]
    parts = _RANGE.split(path)[::3]
    files = [
        Path("".join(part + (chosen[at] if at < len(chosen) else "") for at, part in enumerate(parts)))
        for chosen in itertools.product(*numbers)
    ]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(
            f"there is no file {missing[0]} ({len(missing)} of {len(files)} are missing).",
            fix="check the path.",
        )
    return files


class _Shards:
    """The samples of tar files by number."""

    def __init__(self, files: list[Path]) -> None:
        self._samples: list[tuple[Path, str, dict[str, tuple[int, int]]]] = []
        for file in files:
            self._samples += _samples_in(file)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, key, members = self._samples[index]
        found: dict[str, Any] = {_KEY: key}
        with open(file, "rb") as opened:
            for extension, (offset, size) in members.items():
                opened.seek(offset)
                try:
                    found[extension] = _decoded(extension, opened.read(size))
                except (ValueError, EOFError) as error:
                    raise DataError(
                        f"sample {index} (file {file}, {key}.{extension}) is damaged: {error}",
                        fix="write the shard again.",
                    ) from error
        return found


def _samples_in(file: Path) -> list[tuple[Path, str, dict[str, tuple[int, int]]]]:
    samples: list[tuple[Path, str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                name = os.path.basename(member.name)
                if not member.isfile() or name.startswith(".") or "." not in name:
                    continue
                stem, _, extension = name.partition(".")
                key = os.path.join(os.path.dirname(member.name), stem)
                if not samples or samples[-1][1] != key:
                    samples.append((file, key, {}))
                samples[-1][2][extension.lower()] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{file} cannot be read as tar, after {len(samples)} samples: {error}.", fix="write it again."
        ) from error
    return samples


def _decoded(extension: str, content: bytes) -> Any:
    decode = _DECODERS.get(extension.rpartition(".")[2])
    return decode(content) if decode is not None else content


def _array(content: bytes) -> Any:
    return torch.from_numpy(numpy.load(io.BytesIO(content), allow_pickle=False))


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "txt": lambda content: content.decode(),
    "cls": int,
    "index": int,
    "json": json.loads,
    "npy": _array,
}
