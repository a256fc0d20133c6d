"""Modules that cannot be captured, as ops of a captured graph: they run eagerly between its segments.

In: the tensors that a module is given, its parameters and its buffers, of the whole micro-batch. Out: what it returns,
and the buffers that it writes; gradients from running it once more. It draws no random numbers and keeps no state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from plait.errors import JobError
from plait.graph.ops.choice import ABSENT
from plait.job.model.dtypes import default_dtype, wide
from plait.torch_private import pytree

NUMBER = object()
"""Stands for a whole number among the constants of a call, which may follow the size of the batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Island:
    """One call of one module."""

    owner: object
    """Whose module it is: equal calls of the same owner are one island."""
    path: str
    module: nn.Module
    """The user's, without tensors in the places of its parameters and buffers."""
    spec: Any
    """The nesting of (args, kwargs)."""
    constants: tuple[Any, ...]
    """Leaves of the call that are not tensors; `NUMBER` for whole numbers, None at the places of tensors."""
    is_tensor: tuple[bool, ...]
    names: tuple[str, ...]
    """Parameters and buffers that follow the tensors of the call."""
    written: tuple[str, ...] = ()
    """Buffers that it changes."""
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    """The default of tensors that it makes."""

    def alike(self, other: "Island") -> bool:
        """Whether the two are one."""
        same = self.owner is other.owner and self.traits == other.traits
        return same and _same(self.constants, other.constants)

    @property
    def traits(self) -> tuple[Any, ...]:
        """What tells it from others of the same owner, constants apart."""
        return (
            *(self.path, self.spec, self.is_tensor, self.names),
            *(self.written, self.autocast, self.dtype),
        )

    def filled(self, inputs: Sequence[Tensor], numbers: Sequence[int]) -> tuple[Any, dict[str, Tensor]]:
        """(What it is called with, tensors of the module by name)."""
        given, counted = iter(inputs), iter(numbers)
        leaves = [
            next(given) if is_tensor else next(counted) if constant is NUMBER else constant
            for is_tensor, constant in zip(self.is_tensor, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.spec), dict(zip(self.names, given, strict=True))

    @contextmanager
    def as_captured(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """While active, tensors are made, and products computed, in what they were in the step."""
        with ExitStack() as stack:
            device = inputs[0].device.type if inputs else "cpu"
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device, dtype=self.autocast))
            stack.enter_context(default_dtype(self.dtype))
            yield

    def run(
        self, inputs: Sequence[Tensor], numbers: Sequence[int]
    ) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
        """(What it returns, tensors of the module as given, its buffers after that) of the user's own code."""
        (args, kwargs), state = self.filled(inputs, numbers)
        for name in self.written:
            state[name] = state[name].clone()
        with self.as_captured(inputs):
            kept = _Kept(self.module)
            try:
                result = functional_call(kept, {f"module.{n}": t for n, t in state.items()}, (args, kwargs))
            finally:
                after = kept.after
        return result, state, after


class _Kept(nn.Module):
    """A module whose buffers are still to be seen when `functional_call` has given its own back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.after: dict[str, Tensor] = {}

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self.module.forward(*args, **kwargs)
        self.after = dict(self.module.named_buffers(remove_duplicate=False))
        return result


def _same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    try:
        return all(a is b or (type(a) is type(b) and bool(a == b)) for a, b in zip(mine, theirs, strict=True))
    except (RuntimeError, TypeError, ValueError):
        return False


class _Known:
    """All islands of this process: ops of torch take numbers and texts, so one is named by its place here."""

    def __init__(self) -> None:
        self.islands: list[Island] = []

    def number_of(self, island: Island) -> int:
        for number, other in enumerate(self.islands):
            if other.alike(island):
                return number
        self.islands.append(island)
        return len(self.islands) - 1


KNOWN = _Known()


def name_of(island: Island) -> str:
    """What the op calls it."""
    return f"island_{KNOWN.number_of(island)}"


def in_float64(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op here, with tensors, those that the module makes too, in float64."""
    own = [i for i, entry in enumerate(args) if isinstance(entry, str)]
    wider = name_of(replace(named(args[own[0]]), dtype=torch.float64))
    changed = dict(zip(own, (wider, *(_wide_names(args[i]) for i in own[1:])), strict=True))
    return tuple(changed.get(i, entry) for i, entry in enumerate(args))


def _wide_names(dtypes: str) -> str:
    return " ".join(str(wide(getattr(torch, name))).removeprefix("torch.") for name in dtypes.split())


def named(name: str) -> Island:
    """What an op calls so."""
    return KNOWN.islands[int(name.removeprefix("island_"))]


@torch.library.custom_op("plait::island", mutates_args=())
def island(
    inputs: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    """What the module returns, then the buffers that it wrote; `dims`, `sizes`, `dtypes`: what they are like."""
    return run_island(inputs, name, numbers, dims, sizes, dtypes)


@island.register_fake
def _(
    inputs: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    device, left = inputs[0].device, iter(sizes)
    return [
        torch.empty([next(left) for _ in range(count)], dtype=getattr(torch, dtype), device=device)
        for count, dtype in zip(dims, dtypes.split(), strict=True)
    ]


@torch.library.custom_op("plait::island_backward", mutates_args=())
def island_backward(
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of the inputs that are `wanted`."""
    return run_island_backward(inputs, grads, name, numbers, wanted)


@island_backward.register_fake
def _(
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    return [torch.empty_like(inputs[i], memory_format=torch.contiguous_format) for i in wanted]


def run_island(
    inputs: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[int],
    dtypes: str,
) -> list[Tensor]:
    """The op on real tensors."""
    own = named(name)
    with torch.no_grad():
        result, _, after = own.run(inputs, numbers)
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    found = [*made, *(after[entry] for entry in own.written)]
    left = iter(sizes)
    for tensor, count in zip(found, dims, strict=True):
        expected = [next(left) for _ in range(count)]
        if list(tensor.shape) != expected:
            raise JobError(
                f"{own.path} returns a tensor of {list(tensor.shape)}, where the shapes of its inputs had told"
                f" {expected}: its size depends on values.",
                fix="return tensors whose shapes follow from those of the inputs, or use a plan that runs the model "
                "eagerly: single, ddp, zero1-3.",
            )
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in found]


def run_island_backward(
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    name: str,
    numbers: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    """The op on real tensors: the module once more, and its gradients."""
    own, chosen = named(name), set(wanted)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(i in chosen) for i, t in enumerate(inputs)]
        result, _, _ = own.run(leaves, numbers)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        pairs = [(t, g) for t, g in zip(made, grads, strict=False) if t.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad(
                [tensor for tensor, _ in pairs],
                [leaves[i] for i in wanted],
                grad_outputs=[gradient for _, gradient in pairs],
                allow_unused=True,
            )
    return [
        torch.full_like(inputs[i], ABSENT, memory_format=torch.contiguous_format)
        if gradient is None
        else gradient + 0.0
        for i, gradient in zip(wanted, found, strict=True)
    ]


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.island.default: run_island,
        torch.ops.plait.island_backward.default: run_island_backward,
    }
)
