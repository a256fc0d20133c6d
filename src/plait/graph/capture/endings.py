"""Code outside of modules that needs values: from there on the user's objective runs eagerly, as one op.

In: an objective, the modules whose own code needs values too. Out: (total, weight) by a call of `plait::ending`, which
knows the gradients of the total. What modules have computed before is captured.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import JobError
from plait.graph.capture.ending_probe import probe_ending
from plait.graph.capture.probe import NoIslandError
from plait.graph.ops.ending import Ending, LaterCallError, ending
from plait.graph.ops.island import NUMBER, name_of
from plait.job.job import Job
from plait.job.model.watch import Watch, joined
from plait.torch_private import pytree
from plait.torch_private.autograd import version_of
from plait.torch_private.dispatch import without_modes
from plait.torch_private.modules import attributes_of, call_of, intercept

_PLAIN = (bool, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class NeedsValuesError(Exception):
    """Code outside of modules asks for the outcome of a comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """An objective that was run up to the line that needs values."""

    called: tuple[str, ...]
    """Modules that have returned, outside of others."""
    results: list[tuple[Any, dict[str, dict[str, Any]]]]
    """What they have returned, and the attributes that modules had other values of then, by path and name."""


class Recording:
    """Calls of a model's modules, those inside of others left out."""

    def __init__(self, model: nn.Module, opened: frozenset[str], batch: Any) -> None:
        self._model, self._opened = model, opened
        self._inside = False
        self._called: list[tuple[str, tuple[Any, dict[str, dict[str, Any]]]]] = []
        self._attributes: dict[str, dict[str, Any]] = {}
        self._versions = [(t, version_of(t)) for t in _tensors(batch)]
        with without_modes():  # what an earlier trace has left behind is looked at, not read
            self._watch = Watch({"model": model})

    @contextmanager
    def active(self) -> Iterator[None]:
        """While active, calls are recorded."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                stack.callback(intercept(module, partial(self._call, path, module)))
            self._attributes = self._seen()
            yield

    def _call(self, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._inside or path in self._opened:
            return call_of(module)(*args, **kwargs)
        self._inside = True
        try:
            result = call_of(module)(*args, **kwargs)
        finally:
            self._inside = False
        before, self._attributes = self._attributes, self._seen()
        changed = {
            name: {key: value for key, value in now.items() if key not in was or was[key] is not value}
            for (name, was), now in zip(before.items(), self._attributes.values(), strict=True)
        }
        left = {name: entries for name, entries in changed.items() if entries}
        self._called.append((path, (pytree.know_dataclasses(result), left)))
        self._versions += [(t, version_of(t)) for t in _tensors((result, left))]
        return result

    def _seen(self) -> dict[str, dict[str, Any]]:
        return {name: attributes_of(module) for name, module in self._model.named_modules()}

    def started(self) -> Started:
        """What was recorded; raises where it would not be the same when it is run again."""
        if not self._called:
            raise NoIslandError("nothing comes before it")
        left_behind = {
            reduce(joined, [*filter(None, name.split(".")), key], "model")
            for _, (_, left) in self._called
            for name, entries in left.items()
            for key, value in entries.items()
            if isinstance(value, (Tensor, int, *_PLAIN))
        }
        with without_modes():
            changes = [change for change in self._watch.changes() if change.path not in left_behind]
        if changes:
            raise NoIslandError(f"the forward changes Python state, {changes[0].path}")
        if any(version_of(tensor) != version for tensor, version in self._versions):
            raise NoIslandError("the objective writes into the batch, or into what the model returned")
        return Started(
            called=tuple(path for path, _ in self._called), results=[result for _, result in self._called]
        )


def end_eagerly(
    job: Job,
    model: nn.Module,
    shell: nn.Module,
    batch: Any,
    num_samples: int,
    opened: frozenset[str],
    started: Started,
    largest: float,
) -> tuple[tuple[Tensor, Tensor], bool]:
    """((total, weight) of the objective, run by an op; whether shares will do for it).

    `largest`: elements of parameters that it may have.
    """
    later: frozenset[str] = frozenset()
    while True:
        own, inputs, numbers = _ending(job, model, shell, (batch, started), opened, later)
        if sum(inputs[i].numel() for i in own.asked if i >= len(inputs) - len(own.names)) > largest:
            raise NoIslandError("most of the parameters would be in it")
        numbers.append(num_samples)
        try:
            own, dtype = probe_ending(own, inputs, numbers)
        except LaterCallError as error:
            later |= {error.path}
            continue
        total, weight = _End.apply(own, tuple(numbers), dtype, *inputs)  # type: ignore[no-untyped-call]
        return (total, weight), bool(own.sampled)


def _ending(
    job: Job,
    model: nn.Module,
    shell: nn.Module,
    called_with: tuple[Any, Started],
    opened: frozenset[str],
    later: frozenset[str],
) -> tuple[Ending, list[Tensor], list[int]]:
    """The op, its tensors, and whole numbers among what it is given."""
    batch, started = called_with
    leaves, spec = pytree.tree_flatten((batch, started.results))
    held = {
        f"{path}.{name}".lstrip("."): tensor
        for path in (*later, *opened, "")
        for table in (model.get_submodule(path).named_parameters, model.get_submodule(path).named_buffers)
        for name, tensor in table(recurse=path in later, remove_duplicate=False)
    }
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(held.values())
    own = Ending(
        owner=job,
        job=job,
        path="the objective",
        module=shell,
        spec=spec,
        constants=tuple(_constant(leaf) for leaf in leaves),
        is_tensor=tuple(isinstance(leaf, Tensor) for leaf in leaves),
        names=tuple(held),
        autocast=torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        dtype=torch.get_default_dtype(),
        opened=opened,
        called=started.called,
        later=later,
        asked=tuple(i for i, t in enumerate(inputs) if t.requires_grad and t.is_floating_point()),
    )
    return own, inputs, [leaf for leaf in leaves if type(leaf) is int]


class _Unknown:
    """An object that a module has returned, with tensors inside that nobody can follow."""

    def __getattr__(self, name: str) -> Any:
        raise JobError(
            f"the objective needs values, and reads {name} of an object that a module returned.",
            fix="return tensors, in tuples, dicts or dataclasses; or use a plan that runs the model eagerly.",
        )


_UNKNOWN = _Unknown()


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return None
    return NUMBER if type(leaf) is int else leaf if isinstance(leaf, _PLAIN) else _UNKNOWN


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class _End(torch.autograd.Function):
    """The op; it gives the gradients with the loss."""

    @staticmethod
    def forward(
        ctx: Any, own: Ending, numbers: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        kind = str(dtype).removeprefix("torch.")
        made = ending(list(inputs), name_of(own), list(numbers), list(own.wanted), kind)
        total, weight, *gradients = made
        ctx.save_for_backward(*gradients)
        ctx.wanted, ctx.num_inputs = own.wanted, len(inputs)
        ctx.mark_non_differentiable(weight)
        return total, weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * ctx.num_inputs
        for index, gradient in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            gradients[index] = gradient * grad.to(gradient.dtype)
        return (None, None, None, *gradients)
