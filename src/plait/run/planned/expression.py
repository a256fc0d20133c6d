"""A recording from the model's inputs to a loss, as an objective that a job can have.

In: a `Promise`. Out: an `Expression`, which names what is computed in words that are equal on all ranks and in all
steps that compute the same, and the tensors that it takes. Its `objective` does the same calls on any model and batch.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import UsageError
from plait.job.batch import tensors_in
from plait.run.planned.parameters import HeldParameter
from plait.run.planned.promise import Call, PerClass, Promise
from plait.torch_private import pytree


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that a call before it returned."""

    call: int
    index: int


@dataclass(frozen=True, slots=True)
class _Given:
    """A tensor of the batch."""

    index: int


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter of the model, by name."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Expression:
    """What is minimized."""

    calls: tuple[Call, ...]
    """In their order; their arguments refer to those before."""
    root: _Result
    given: tuple[Tensor, ...]
    """The tensors that were given to the calls."""
    counts: tuple[bool, ...]
    """Which of them may have samples on dim 0."""
    text: str
    """Equal where the same is computed."""

    def tensor(self, argument: Any) -> Tensor | None:
        """The tensor that an argument of a call stands for; None: it is none of the batch."""
        return self.given[argument.index] if isinstance(argument, _Given) else None

    def objective(self, model: nn.Module, batch: Any) -> Tensor:
        """The same calls on another model and batch."""
        made: list[list[Tensor]] = []

        def actual(leaf: Any) -> Any:
            match leaf:
                case _Result():
                    return made[leaf.call][leaf.index]
                case _Given():
                    return batch[leaf.index]
                case _Weight():
                    return model.get_parameter(leaf.name)
            return leaf

        for call in self.calls:
            args, kwargs = pytree.tree_map(actual, (call.args, dict(call.kwargs)))
            device = next((tensor.device.type for tensor in batch), "cpu")
            half = torch.autocast(device, call.autocast) if call.autocast else nullcontext()
            with half, torch.set_grad_enabled(call.grad and torch.is_grad_enabled()):
                result = model(*args, **kwargs) if call.function is None else call.function(*args, **kwargs)
            made.append(_tensors(result))
        return made[self.root.call][self.root.index]


def _tensors(result: Any) -> list[Tensor]:
    """Those of a result, in the order in which promises were numbered."""
    return list(tensors_in(result))


def expression_of(promise: Promise) -> Expression:
    """Everything that a promise depends on."""
    if promise.like.numel() != 1 or promise.like.dim():
        raise UsageError(
            f"a step is trained on one number; this has shape {tuple(promise.like.shape)}.",
            fix="reduce it, for example with .mean(); outputs are there under torch.no_grad() with model.eval().",
        )
    numbers: dict[int, int] = {}
    calls: list[Call] = []
    given: dict[int, tuple[int, Tensor, bool]] = {}
    told: list[str] = []

    def reference(leaf: Any) -> Any:
        if isinstance(leaf, HeldParameter):
            return _Weight(leaf.called)
        if isinstance(leaf, Promise):
            return _Result(visit(leaf.call), leaf.position)
        counts = not isinstance(leaf, PerClass)
        tensor = leaf if counts else leaf.tensor
        if isinstance(tensor, Tensor):
            entry = given.setdefault(id(tensor), (len(given), tensor, counts))
            return _Given(entry[0])
        return leaf

    def visit(call: Call) -> int:
        if id(call) not in numbers:
            args, kwargs = pytree.tree_map(reference, (call.args, dict(call.kwargs)))
            numbers[id(call)] = len(calls)
            calls.append(
                Call(function=call.function, args=args, kwargs=kwargs, grad=call.grad, autocast=call.autocast)
            )
            told.append(_text(calls[-1]))
        return numbers[id(call)]

    root = _Result(visit(promise.call), promise.position)
    entries = sorted(given.values(), key=lambda entry: entry[0])
    return Expression(
        calls=tuple(calls),
        root=root,
        given=tuple(tensor.detach() for _, tensor, _ in entries),
        counts=tuple(counts and tensor.dim() > 0 for _, tensor, counts in entries),
        text="; ".join((*told, repr(root))),
    )


def _text(call: Call) -> str:
    name = "model" if call.function is None else _name_of(call.function)
    halves = f" in {call.autocast}" if call.autocast else ""
    return f"{name}({_words(call.args)}, {_words(call.kwargs)}){halves}{'' if call.grad else ' without gradients'}"


def _words(tree: Any) -> str:
    leaves, spec = pytree.tree_flatten(dict(tree) if isinstance(tree, Mapping) else tree)
    return f"{spec} of {leaves!r}"


def _name_of(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
