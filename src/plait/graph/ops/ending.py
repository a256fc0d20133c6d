"""The end of a step, where code outside of modules needs values: the user's objective, run eagerly.

In: the batch, and what the model's modules had returned when that code was reached. Out: total and weight of the loss,
and gradients of the total. The objective is run from its beginning: calls of modules give back what is known of them,
and only those that come later run, on parameters that are given. It sees the whole micro-batch, or shares where it
was found to be a sum over samples.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.errors import JobError
from plait.graph.ops.island import Island, named
from plait.job.job import Job
from plait.job.reading import total_and_weight
from plait.torch_private.modules import call_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Ending(Island):
    """One way to it; `module` is the whole model."""

    job: Job
    opened: frozenset[str]
    """Modules whose own code is run again: it is what needs values."""
    called: tuple[str, ...]
    """Modules whose results are known, in the order of their calls."""
    later: frozenset[str] = frozenset()
    """Modules that are called after these."""
    asked: tuple[int, ...]
    """Inputs that gradients may go to."""
    wanted: tuple[int, ...] = ()
    """Those of them that some were found of."""
    sampled: tuple[int, ...] = ()
    """Inputs whose first dim is cut with the samples; none: it must see all of them."""
    extent: int = 0
    """Of that dim of the first of these, for one sample."""

    @property
    def traits(self) -> tuple[Any, ...]:
        """See `Island`."""
        own = (self.opened, self.called, self.later, self.asked, self.wanted, self.sampled, self.extent)
        return (*super().traits, *own)

    def loss(self, inputs: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """[total, weight, gradients of the total for what is `wanted`]."""
        if self.sampled and inputs[self.sampled[0]].shape[0] == 0:
            zero = torch.zeros((), dtype=self.dtype, device=inputs[0].device)
            return [zero, zero.clone(), *(torch.zeros_like(inputs[i]) for i in self.wanted)]
        total, weight, gradients = self.differentiated(inputs, numbers)
        found = dict(zip(self.asked, gradients, strict=True))
        if any(gradient is not None and index not in self.wanted for index, gradient in found.items()):
            raise JobError(
                f"{self.path} uses a result of the model that it did not use before.",
                fix="use the same results in every step, or a plan that runs the model eagerly: single or ddp.",
            )
        return [total, weight, *(_scaled(inputs[i], found[i], weight) for i in self.wanted)]

    def result(self, leaves: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Any, Any]:
        """(the batch, what the objective returns)."""
        (batch, known), state = self.filled(leaves, numbers)
        with self.as_captured(leaves), _replayed(_Replay(self, known)):
            whole = _Whole(self.job, self.module)
            return batch, functional_call(whole, {f"model.{n}": t for n, t in state.items()}, (batch,))

    def differentiated(
        self, inputs: Sequence[Tensor], numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Total, weight, and the gradients of total / weight for all that is `asked`."""
        *others, num_samples = numbers
        if self.sampled:
            num_samples = inputs[self.sampled[0]].shape[0] // self.extent
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(i in self.asked) for i, t in enumerate(inputs)]
            batch, result = self.result(leaves, others)
            total, weight = total_and_weight(self.job, batch, num_samples, result)
            mean = result if isinstance(result, Tensor) else total / weight
            gradients: list[Tensor | None] = [None] * len(self.asked)
            if mean.requires_grad:
                asked = [leaves[i] for i in self.asked]
                gradients = list(torch.autograd.grad(mean, asked, allow_unused=True))
        return total.detach(), weight.detach(), gradients


def _scaled(like: Tensor, gradient: Tensor | None, weight: Tensor) -> Tensor:
    """The gradient of a total, of that of its mean: nothing where nothing was counted."""
    if gradient is None or float(weight) == 0:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return (gradient * weight.to(gradient.dtype)).contiguous()


class _Whole(nn.Module):
    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.job, self.model = job, model

    def forward(self, batch: Any) -> Any:
        return self.job.objective_of(self.model, batch)


class LaterCallError(Exception):
    """A module is called whose result is not known, and whose parameters are not given."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path or 'the model'} is called after values were needed")
        self.path = path


class _Replay:
    """Calls of modules in one run of an objective."""

    def __init__(self, own: Ending, known: Sequence[tuple[Any, dict[str, dict[str, Any]]]]) -> None:
        self._own, self._left = own, list(zip(own.called, known, strict=True))[::-1]
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def end(self) -> None:
        """Leave modules as they were."""
        for held, before in reversed(self._before):
            held.clear()
            held.update(before)

    def call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if path in self._own.opened or any(_within(path, later) for later in self._own.later):
            return call_of(module)(*args, **kwargs)
        if not self._left:
            raise LaterCallError(path)
        name, (result, left) = self._left.pop()
        if name != path:
            raise JobError(
                f"{self._own.path} calls {path or 'the model'}, where it had called {name or 'the model'} before.",
                fix="call modules in the same order in every step, or use a plan that runs the model eagerly: "
                "single or ddp.",
            )
        for at, entries in left.items():  # what the call had left behind
            held = vars(self._own.module.get_submodule(at))
            self._before.append((held, dict(held)))
            held.update(entries)
        return result


def _within(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")


_REPLAY: ContextVar[_Replay | None] = ContextVar("replay", default=None)
"""What modules of an ending give back in this thread, if anything."""
_ONE = threading.Lock()
"""Ranks that are threads share the modules of an ending, and what is left behind in them."""


@contextmanager
def _replayed(replay: _Replay) -> Iterator[None]:
    with _ONE:
        token = _REPLAY.set(replay)
        try:
            yield
        finally:
            _REPLAY.reset(token)
            replay.end()


def called(path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A call of a module of the model that endings run in."""
    replay = _REPLAY.get()
    return call_of(module)(*args, **kwargs) if replay is None else replay.call(path, module, args, kwargs)


@torch.library.custom_op("plait::ending", mutates_args=())
def ending(
    inputs: Sequence[Tensor], name: str, numbers: Sequence[int], wanted: Sequence[int], dtype: str
) -> list[Tensor]:
    """Total and weight, of `dtype`, and the gradients of the total for the inputs that are `wanted`."""
    return run_ending(inputs, name, numbers, wanted, dtype)


@ending.register_fake
def _(
    inputs: Sequence[Tensor], name: str, numbers: Sequence[int], wanted: Sequence[int], dtype: str
) -> list[Tensor]:
    scalars = [torch.empty((), dtype=getattr(torch, dtype), device=inputs[0].device) for _ in range(2)]
    return scalars + [torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in wanted]


def run_ending(
    inputs: Sequence[Tensor], name: str, numbers: Sequence[int], wanted: Sequence[int], dtype: str
) -> list[Tensor]:
    """The op on real tensors."""
    total, weight, *gradients = ending_named(name).loss(inputs, numbers)
    scalars = [entry.to(getattr(torch, dtype)) for entry in (total, weight)]
    return [*scalars, *gradients]


def ending_named(name: str) -> Ending:
    """What the op calls so."""
    found = named(name)
    assert isinstance(found, Ending)
    return found


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {torch.ops.plait.ending.default: run_ending}
)
