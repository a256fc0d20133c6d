"""One `TrainingState` as three files: `model.safetensors`, `optimizer.safetensors` and `state.json`.

In: a state and an existing folder, or such a folder. Out: the files, each on the disk when its writer returns, or
the state. Reading believes nothing: each field is checked for its type, each name against the tensors. No pickle.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.errors import CheckpointError
from plait.files.document import Document, read_bytes
from plait.files.shape import decode_python_json, shaped
from plait.run.checkpoint.files import FORMAT, step_of, sync
from plait.run.checkpoint.state import OptimizerState, TrainingState
from plait.version import VERSION

FORMAT_VERSION = 1
"""Of what is written; a reader of another refuses it."""
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
FILES = (MODEL, OPTIMIZER, STATE)
_BESIDE, _AVERAGE = "beside:", "average:"


def write_model(folder: Path, state: TrainingState) -> None:
    """Parameters and buffers under their canonical names; tied ones once, the aliases in the metadata."""
    write_tensors(folder / MODEL, state.parameters | state.buffers, aliases=state.aliases)


def write_optimizer(folder: Path, state: TrainingState) -> None:
    """The optimizer's tensors as `<parameter name>/<key>`, averages as `average:<name>`, what lies beside as
    `beside:<name>`."""
    tensors = {f"{_BESIDE}{name}": tensor for name, tensor in state.beside.items()}
    tensors |= {f"{_AVERAGE}{name}": tensor for name, tensor in state.average.items()}
    for name, entries in state.optimizer.tensors.items():
        for key, tensor in entries.items():
            if "/" in key:
                raise CheckpointError(f"the optimizer's state key {key!r} of {name} contains a slash")
            tensors[f"{name}/{key}"] = tensor
    write_tensors(folder / OPTIMIZER, tensors, aliases={})


def write_json(folder: Path, state: TrainingState) -> None:
    """Everything that is not a tensor. NaN and infinity are written as Python's json module writes them."""
    data = {
        "format": FORMAT_VERSION,
        "plait": VERSION,
        "step": state.step,
        "dtypes": {name: _dtype(tensor) for name, tensor in (state.parameters | state.buffers).items()},
        "buffers": list(state.buffers),
        "transient": list(state.transient),
        "aliases": state.aliases,
        "optimizer": {"groups": state.optimizer.groups, "values": state.optimizer.values},
        "schedule": state.schedule,
        "extra": state.extra,
        "averaged": state.averaged,
    }
    _require_json(data, "state")
    (folder / STATE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    sync(folder / STATE)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], *, aliases: Mapping[str, str]) -> None:
    """A safetensors file of the tensors, each with memory of its own; the file is on the disk on return."""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError("a tensor cannot be called '__metadata__' in a safetensors file")
        if tensor.dtype == torch.complex128 or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{name} is {_dtype(tensor)} ({tensor.layout}); safetensors holds dense real tensors and complex64"
            )
    metadata = {"format": "pt"} | ({"aliases": json.dumps(dict(aliases))} if aliases else {})
    save_file({name: _owned(tensor) for name, tensor in tensors.items()}, path, metadata=metadata)
    sync(path)


class _Version(msgspec.Struct):
    format: Any = None
    plait: Any = None


class _Optimizer(msgspec.Struct):
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, int | float | bool | None]]


class _Members(msgspec.Struct):
    """Of an optimizer's group, beside its options."""

    names: list[str]
    shapes: list[list[int]]


class _State(msgspec.Struct):
    """`state.json`."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    dtypes: dict[str, str]
    buffers: list[str]
    transient: list[str]
    aliases: dict[str, str]
    optimizer: _Optimizer
    schedule: dict[str, Any]
    extra: dict[str, Any]
    averaged: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


def read_state(folder: Path) -> TrainingState:
    """The state in a folder whose sums have been checked."""
    where = folder / STATE
    content = read_bytes(where, FORMAT)
    written = decode_python_json(content, _Version, str(where), FORMAT)
    if written.format != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format {written.format!r}, written by plait {written.plait!r};"
            f" this plait ({VERSION}) reads format {FORMAT_VERSION}",
            fix="resume with the plait version that wrote it.",
        )
    data = decode_python_json(content, _State, str(where), FORMAT)
    if (named := step_of(folder)) is not None and named != data.step:
        raise CheckpointError(
            f"{where} says that {data.step} steps are done, the name of its folder {named}: one of them was changed",
            fix="resume from another checkpoint.",
        )
    tensors = _read_tensors(folder / MODEL)
    found = {name: _dtype(tensor) for name, tensor in tensors.items()}
    if found != data.dtypes:
        name = min(n for n in found.keys() | data.dtypes.keys() if found.get(n) != data.dtypes.get(n))
        raise CheckpointError(
            f"{folder}: {name!r} is {found.get(name, 'missing')} in {MODEL},"
            f" {data.dtypes.get(name, 'missing')} in {STATE}"
        )
    if unknown := [name for name in data.buffers if name not in tensors]:
        raise CheckpointError(f"{where} lists the buffer {unknown[0]!r}, which is not in {MODEL}")
    stored = _read_tensors(folder / OPTIMIZER)
    beside = {name.removeprefix(_BESIDE): t for name, t in stored.items() if name.startswith(_BESIDE)}
    average = {name.removeprefix(_AVERAGE): t for name, t in stored.items() if name.startswith(_AVERAGE)}
    stored = {name: t for name, t in stored.items() if not name.startswith((_BESIDE, _AVERAGE))}
    return TrainingState(
        step=data.step,
        parameters={name: tensor for name, tensor in tensors.items() if name not in data.buffers},
        buffers={name: tensors[name] for name in data.buffers},
        aliases=data.aliases,
        transient=tuple(data.transient),
        optimizer=_read_optimizer(folder, data.optimizer, tensors, stored),
        schedule=data.schedule,
        extra=data.extra,
        average=average,
        averaged=data.averaged,
        beside=beside,
    )


def _read_optimizer(
    folder: Path, data: _Optimizer, parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor]
) -> OptimizerState:
    where = str(folder / STATE)
    for number, group in enumerate(data.groups):
        members = shaped(Document(values=group, where=f"{where}: group {number}"), _Members, FORMAT)
        if len(members.shapes) != len(members.names):
            raise CheckpointError(
                f"{where}: an optimizer group has {len(members.names)} names and {len(members.shapes)} shapes"
            )
    tensors: dict[str, dict[str, Tensor]] = {}
    for joined, tensor in stored.items():
        name, _, key = joined.rpartition("/")
        tensors.setdefault(name, {})[key] = tensor
    for name in [*tensors, *data.values]:
        if name not in parameters:
            raise CheckpointError(f"{folder}: the optimizer has state of {name!r}, which is not a parameter")
    return OptimizerState(groups=data.groups, tensors=tensors, values=data.values)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
    return tensors


def _owned(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and the only tensor in its storage: views of a shared bucket are copied out."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _require_json(value: Any, where: str) -> None:
    """JSON values only, and only such as come back equal: no tuples, no keys that are not text."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; a checkpoint's keys are text")
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}; a checkpoint's values are JSON: text, numbers, lists and objects",
            fix="convert it first, for example with list(...) or .item().",
        )
