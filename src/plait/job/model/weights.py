"""Weights that a model begins with, from files that others wrote.

In: a module and a path: safetensors, a `state_dict` of torch, a Hugging Face folder, the index of a file in parts. Out:
the module with what the files hold under its names, and what was missing on either side. Files are mapped, not read:
one tensor at a time is copied to where it belongs, so that a model is never in memory twice. Never runs a pickle.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor, nn

from plait.errors import JobError
from plait.files.document import Format
from plait.files.shape import read_json

_NAMES = (
    "model.safetensors.index.json", "model.safetensors", "weights.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin", "weights.pt",
)  # fmt: skip
"""What a folder of weights holds, the best first."""
_INSIDE = ("state_dict", "model", "model_state_dict")
"""Under which scripts keep the weights in a file that holds more."""
_PREFIXES = ("module.", "_orig_mod.", "model.")
"""What wrappers put before the names of the model that they hold."""
_FORMAT = Format(noun="an index of weights", error=JobError, fix="name the right file.", max_bytes=64 << 20)
_SHOWN = 3
"""Names that are told; the rest is counted."""


class _Index(msgspec.Struct):
    """Of weights in several files: in which each tensor is."""

    weight_map: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What became of a model's tensors."""

    path: Path
    found: int
    """Tensors that the files gave."""
    missing: tuple[str, ...]
    """The model's, which stay as they were initialized."""
    unexpected: tuple[str, ...]
    """The files', which the model does not have."""

    def lines(self) -> list[str]:
        """What a person should know."""
        told = [f"{self.found} tensors begin as in {self.path}."]
        if self.missing:
            told.append(f"not in {self.path}, so initialized: {_some(self.missing)}.")
        if self.unexpected:
            told.append(f"in {self.path}, but not in the model: {_some(self.unexpected)}.")
        return told


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def load_weights(model: nn.Module, path: Path) -> Loaded:
    """Give a model the tensors that files hold under its names; raises where none fits, or one has another shape."""
    own: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
    files = _files(path)
    names = [name for file in files for name in _names_in(file)]
    rename = _prefix(names, own, getattr(model, "base_model_prefix", ""))
    done: set[str] = set()
    unexpected: list[str] = []
    with torch.no_grad():
        for file in files:
            with closing(_tensors(file)) as tensors:
                for name, tensor in tensors:
                    target = own.get(rename(name))
                    if target is None:
                        unexpected.append(name)
                        continue
                    if target.shape != tensor.shape:
                        raise JobError(
                            f"{name} is {list(tensor.shape)} in {file} and {list(target.shape)} in the model.",
                            fix="build the model that the weights were trained with.",
                        )
                    target.detach().copy_(tensor)
                    done.add(rename(name))
    if not done:
        raise JobError(
            f"none of the {len(names)} tensors in {path} has a name of the model's: {_some(tuple(names))} "
            f"against {_some(tuple(own))}.",
            fix="give weights of this model.",
        )
    memory = {own[name].data_ptr() for name in done}
    missing = tuple(n for n in own if n not in done and own[n].data_ptr() not in memory)
    return Loaded(path=path, found=len(done), missing=missing, unexpected=tuple(unexpected))


def _files(path: Path) -> list[Path]:
    """The files that hold the tensors."""
    if path.is_dir():
        found = next((path / name for name in _NAMES if (path / name).exists()), None)
        if found is None:
            raise JobError(
                f"{path} holds no weights: none of {', '.join(_NAMES)}.",
                fix="name the file; of a run, use `plait export` first or name one of its checkpoints.",
            )
        path = found
    if not path.is_file():
        raise JobError(f"there is no file {path}.", fix="name a file of weights, or a folder that has one.")
    if path.name.endswith(".index.json"):
        parts = sorted(set(read_json(path, _Index, _FORMAT).weight_map.values()))
        outside = next((part for part in parts if not part or Path(part).name != part), None)
        if outside is not None:
            raise JobError(f"{path} names {outside!r}, which is not beside it.", fix="take another index.")
        return [path.with_name(part) for part in parts]
    return [path]


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch and safetensors raise what they meet in a file that is none
        raise JobError(
            f"{file} cannot be read as weights: {str(error).splitlines()[0] if str(error) else 'it is empty'}",
            fix="give a safetensors file, or a state_dict that torch.save wrote.",
        ) from error


def _tensors(file: Path) -> Generator[tuple[str, Tensor], None, None]:
    """The tensors of a file, one after the other; each is read when it is looked at."""
    with _reading(file):
        if _is_safetensors(file):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    yield name, opened.get_tensor(name)
        else:
            yield from _state_dict(file).items()


def _names_in(file: Path) -> list[str]:
    with _reading(file):
        if not _is_safetensors(file):
            return list(_state_dict(file))
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())


def _head(file: Path) -> bytes:
    """Its first bytes, which tell what it is: a name may be anything."""
    with file.open("rb") as opened:
        return opened.read(9)


def _is_safetensors(file: Path) -> bool:
    """The length of a header in 8 bytes, then the header, which is JSON."""
    return _head(file)[8:] == b"{"


def _state_dict(file: Path) -> dict[str, Tensor]:
    # What torch wrote before 1.6 cannot be mapped; by this suffix torch would read safetensors.
    is_mapped = _head(file).startswith(b"PK") and file.suffix != ".safetensors"
    with file.open("rb") as opened:
        held: Any = torch.load(
            file if is_mapped else opened, map_location="cpu", mmap=is_mapped, weights_only=True
        )
    for key in _INSIDE:
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    if not isinstance(held, dict):
        raise RuntimeError(f"it holds a {type(held).__name__}, not a state_dict")
    return {
        name: value for name, value in held.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


class _Renamed:
    """Names of files as the model has them: with a prefix less, or more."""

    def __init__(self, less: str, more: str) -> None:
        self._less, self._more = less, more

    def __call__(self, name: str) -> str:
        return self._more + name.removeprefix(self._less)


def _prefix(names: list[str], own: Mapping[str, Tensor], base: str) -> _Renamed:
    """By which the most names fit; as they are, where that is as good."""
    ways = [_Renamed("", "")]
    for prefix in (*_PREFIXES, f"{base}." if base else ""):
        ways += [_Renamed(prefix, ""), _Renamed("", prefix)] if prefix else []
    return max(ways, key=lambda way: sum(way(name) in own for name in names))
