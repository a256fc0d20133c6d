"""What a checkpoint holds, taken from a model and an optimizer and put back.

In: a module, an optimizer and the names of its parameters. Out: plain values (`TrainingState`) of named tensors and
JSON, or the module and the optimizer set to such a value, bit for bit. It never touches files, and never communicates:
under a sharded plan the caller gathers first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import CheckpointError
from plait.torch_private.wrappers import in_parts

JsonDict = dict[str, Any]

# How this process runs the update, not what the update is: kept as the optimizer at hand has them.
_IMPLEMENTATION_KEYS = frozenset(
    {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState:
    """An optimizer's state, keyed by parameter names instead of positions."""

    groups: list[JsonDict]
    """One dict per parameter group: its options, its parameters' "names" and their "shapes"."""
    tensors: dict[str, dict[str, Tensor]]
    """Parameter name -> state key -> tensor; step counters are 0-dim tensors."""
    values: dict[str, dict[str, int | float | bool | None]]
    """Parameter name -> state key -> what the optimizer keeps as a plain number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Everything that the next optimizer step depends on."""

    step: int
    """Optimizer steps done."""
    parameters: dict[str, Tensor]
    """Each parameter once, under its canonical (first) name."""
    buffers: dict[str, Tensor]
    """Each buffer once, the transient ones too."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied tensors -> the canonical name."""
    transient: tuple[str, ...] = ()
    """Buffers that the module leaves out of its `state_dict`; kept for resuming, left out of exports."""
    optimizer: OptimizerState = field(
        default_factory=lambda: OptimizerState(groups=[], tensors={}, values={})
    )
    """The optimizer, by parameter name."""
    schedule: JsonDict = field(default_factory=dict)
    """The learning-rate schedule's own state."""
    extra: JsonDict = field(default_factory=dict)
    """Seed, random state, position in the data, best metric: JSON values only."""
    average: dict[str, Tensor] = field(default_factory=dict)
    """Averaged parameters and buffers, by name; empty where none were taken yet."""
    averaged: int = 0
    """How often they were taken."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """What the plan keeps beside the model, by its own names: the weights of single workers, a center. Other plans do
    not need it to go on."""

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise CheckpointError(f"a checkpoint's step is a whole number from 0 on, not {self.step!r}")
        if both := sorted(self.parameters.keys() & self.buffers.keys()):
            raise CheckpointError(f"{both[0]!r} is both a parameter and a buffer")
        for alias, canonical in self.aliases.items():
            if canonical not in self.parameters and canonical not in self.buffers:
                raise CheckpointError(
                    f"{alias!r} is tied to {canonical!r}, which the checkpoint does not hold"
                )
            if alias in self.parameters or alias in self.buffers:
                raise CheckpointError(f"{alias!r} is tied to {canonical!r} and also held on its own")
        if bool(self.average) != bool(self.averaged) or self.averaged > self.step:
            raise CheckpointError(
                f"{len(self.average)} averaged tensors, taken {self.averaged} times in {self.step} steps, cannot be"
            )
        if self.average:
            _check_shapes("averaged tensor", _shapes(self.parameters | self.buffers), _shapes(self.average))
        if unknown := sorted(set(self.transient) - self.buffers.keys()):
            raise CheckpointError(f"{unknown[0]!r} is listed as transient and is not a buffer")


def snapshot(state: TrainingState) -> TrainingState:
    """A copy on the CPU that shares no memory with training, so that training may go on while it is written."""
    optimizer = OptimizerState(
        groups=[dict(group) for group in state.optimizer.groups],
        tensors={name: _copies(tensors) for name, tensors in state.optimizer.tensors.items()},
        values={name: dict(values) for name, values in state.optimizer.values.items()},
    )
    return replace(
        state,
        parameters=_copies(state.parameters),
        buffers=_copies(state.buffers),
        optimizer=optimizer,
        average=_copies(state.average),
        beside=_copies(state.beside),
    )


def collect_model(
    model: nn.Module,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """(parameters, buffers, aliases, transient) of a module, as `TrainingState` takes them; nothing is copied.

    A tensor that is made of others is told as those, `name.part`.
    """
    names: dict[int, str] = {}
    parameters: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for found, held in (
        (model.named_parameters(remove_duplicate=False), parameters),
        (model.named_buffers(remove_duplicate=False), buffers),
    ):
        for name, tensor in found:
            canonical = names.setdefault(id(tensor), name)
            if canonical == name:
                held[name] = tensor.detach()
            else:
                aliases[name] = canonical
    persistent = model.state_dict(keep_vars=True).keys()
    transient = tuple(name for name in buffers if name not in persistent)
    return in_parts(parameters), in_parts(buffers), aliases, transient


def restore_model(model: nn.Module, state: TrainingState) -> None:
    """Copy parameters and buffers into `model`; on any difference in names or shapes nothing is changed."""
    parameters, buffers, aliases, transient = collect_model(model)
    if aliases != state.aliases or set(transient) != set(state.transient):
        raise CheckpointError(
            f"the model ties {aliases} and leaves {transient} out of its state_dict; the checkpoint says"
            f" {state.aliases} and {state.transient}",
            fix="resume with the model that was saved.",
        )
    for kind, mine, saved in (
        ("parameter", parameters, state.parameters),
        ("buffer", buffers, state.buffers),
    ):
        _check_shapes(kind, _shapes(mine), _shapes(saved))
    with torch.no_grad():
        for name, tensor in (parameters | buffers).items():
            tensor.copy_(state.parameters[name] if name in state.parameters else state.buffers[name])


def collect_optimizer(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]
) -> OptimizerState:
    """The state of `optimizer` by the names in `named` (`model.named_parameters()`); nothing is copied."""
    names = _names_by_identity(named)
    groups: list[JsonDict] = []
    tensors: dict[str, dict[str, Tensor]] = {}
    values: dict[str, dict[str, int | float | bool | None]] = {}
    for group in optimizer.param_groups:
        options = {
            key: _json_option(key, value) for key, value in group.items() if key not in _IMPLEMENTATION_KEYS
        }
        options["names"] = [_name_of(parameter, names) for parameter in group["params"]]
        options["shapes"] = [list(parameter.shape) for parameter in group["params"]]
        groups.append(options)
        for name, parameter in zip(options["names"], group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors.setdefault(name, {})[key] = value.detach()
                elif value is None or isinstance(value, int | float):
                    values.setdefault(name, {})[key] = value
                else:
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of {name} as {type(value).__name__};"
                        " a checkpoint holds tensors and numbers",
                        fix="use an optimizer that keeps tensors, or run without checkpoints.",
                    )
    return OptimizerState(groups=groups, tensors=tensors, values=values)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]], state: OptimizerState
) -> None:
    """Set `optimizer` to `state` exactly; on any difference in groups, names or shapes nothing is changed."""
    names = _names_by_identity(named)
    if len(optimizer.param_groups) != len(state.groups):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups; the checkpoint has {len(state.groups)}",
            fix="build the optimizer as in the run that was saved.",
        )
    for group, saved in zip(optimizer.param_groups, state.groups, strict=True):
        mine = {_name_of(parameter, names): tuple(parameter.shape) for parameter in group["params"]}
        theirs = {name: tuple(shape) for name, shape in zip(saved["names"], saved["shapes"], strict=True)}
        _check_shapes("parameter", mine, theirs)
    skipped = {"names", "shapes", *_IMPLEMENTATION_KEYS}
    options = [
        {key: _like(key, group.get(key), value) for key, value in saved.items() if key not in skipped}
        for group, saved in zip(optimizer.param_groups, state.groups, strict=True)
    ]
    optimizer.state.clear()
    for group, found in zip(optimizer.param_groups, options, strict=True):
        group.update(found)
        on_device = bool(group.get("capturable")) or bool(group.get("fused"))
        for parameter in group["params"]:
            name = _name_of(parameter, names)
            restored: dict[str, Any] = {}
            for key, tensor in state.tensors.get(name, {}).items():
                counter_on_cpu = key == "step" and not on_device
                restored[key] = tensor.detach().clone() if counter_on_cpu else _beside(parameter, tensor)
            restored |= state.values.get(name, {})
            if restored:
                optimizer.state[parameter] = restored


def check_same_options(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], *, moved: Collection[str]
) -> None:
    """Refuse options that are not those of the job's own optimizer: the file, or the job, was changed since.

    `moved`: options that change from step to step, and are set anew at each.
    """
    for number, (mine, theirs) in enumerate(zip(own, saved, strict=True)):
        for key in sorted(mine.keys() & theirs.keys() - _IMPLEMENTATION_KEYS - set(moved)):
            here, there = _json_option(key, mine[key]), theirs[key]
            if here != there:
                raise CheckpointError(
                    f"group {number} of the optimizer has {key}={here} in the job, {key}={there} in the checkpoint:"
                    " one of them was changed since it was saved",
                    fix=f"resume with the job that was saved, or start a new run with {key}={here}.",
                )


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _beside(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A copy on the parameter's device, in its memory layout where the shapes agree; the dtype stays the state's."""
    if tensor.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
    return tensor.detach().to(parameter.device, copy=True)


def _like(key: str, current: Any, saved: Any) -> Any:
    """A saved option as the optimizer has it: a tuple as long, a tensor; anything where it has none."""
    if isinstance(current, tuple | list) and isinstance(saved, list) and len(current) == len(saved):
        return type(current)(_like(key, mine, theirs) for mine, theirs in zip(current, saved, strict=True))
    is_number = isinstance(saved, int | float)
    if isinstance(current, Tensor) and is_number:
        return torch.full_like(current, saved)
    if current is None or type(saved) is type(current) or (isinstance(current, int | float) and is_number):
        return saved
    raise CheckpointError(
        f"the optimizer has {key}={current}; the checkpoint has {saved!r} in its place",
        fix="resume with the job and the checkpoint that were saved.",
    )


def _json_option(key: str, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_json_option(key, item) for item in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(
        f"the optimizer's option {key!r} is a {type(value).__name__}; a checkpoint holds numbers and text"
    )


def _names_by_identity(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    return names


def _name_of(parameter: Tensor, names: Mapping[int, str]) -> str:
    try:
        return names[id(parameter)]
    except KeyError:
        raise CheckpointError(
            f"the optimizer updates a tensor of shape {tuple(parameter.shape)} that is not among the"
            f" {len(names)} named parameters"
        ) from None


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _check_shapes(kind: str, mine: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> None:
    for name in [*mine, *saved]:
        if mine.get(name) != saved.get(name):
            here = f"{mine[name]}" if name in mine else f"missing (of {len(mine)} {kind}s)"
            there = f"{saved[name]}" if name in saved else f"missing (of {len(saved)} {kind}s)"
            raise CheckpointError(
                f"{kind} {name!r} differs: the model has {here}, the checkpoint has {there}",
                fix="resume with the model that was saved.",
            )
