"""Modules that run eagerly inside of a captured step, because their code reads values.

In: where a trace failed. Out: calls of `plait::island` in place of the innermost module there whose results have shapes
that follow from those of its inputs. How they follow is found by running the module on real tensors of those shapes.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.errors import CaptureError
from plait.graph.ops.island import NUMBER, Island, island, island_backward, name_of
from plait.job.copies import copy_of
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.watch import Watch
from plait.threads import at_most
from plait.torch_private import pytree
from plait.torch_private.autograd import version_of
from plait.torch_private.dispatch import without_modes
from plait.torch_private.modules import tables_of

ours = torch.ops.plait
_LARGEST = 0.5
"""Of the model's parameters: with more in islands, ranks of `data` would rather run all of it on their own shares."""


_PROBE_S = 5.0
"""A module runs on made-up numbers in milliseconds, or its loop may never end on them."""


class NoIslandError(Exception):
    """A module cannot be an island."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outputs:
    """What a probe found."""

    spec: Any
    leaves: tuple[Any, ...]
    """Of the result; for a tensor its (shape, dtype)."""
    written: tuple[str, ...]
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of the result, then of the buffers that are written."""
    moving: tuple[bool, ...]
    """Whether a gradient may go through each of them."""
    wanted: tuple[int, ...]
    """Inputs that gradients were found of."""
    held: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of all its buffers, after the call."""


class Islands:
    """The islands of one job; they grow as traces fail."""

    def __init__(self, job: Job, *, all_sizes: bool = False) -> None:
        """`all_sizes`: the plan needs the inside of the model, however little of it can be captured."""
        self._job, self.all_sizes = job, all_sizes
        self._paths: dict[str, str] = {}
        """Modules that are islands, and why."""
        self._refused: set[str] = set()
        self._real: nn.Module | None = None
        self._model: nn.Module | None = None
        self.stack: tuple[str, ...] = ()
        """Modules that were running when the last trace failed, from the outside in."""
        self.failed: str | None = None
        """The island that could not be one in the last trace."""

    def begin(self, model: nn.Module) -> None:
        """A capture starts, of this model with fake tensors."""
        self._model, self.stack, self.failed = model, (), None

    def grow(self, error: CaptureError) -> bool:
        """Make one more island where the last trace failed; False: there is nothing to be made one."""
        if self.failed is not None:
            self._refused.add(self.failed)
            self._paths.pop(self.failed, None)
        self.failed, stack, self.stack = None, self.stack, ()
        model = self._model
        if model is None:
            return False
        everything = sum(p.numel() for p in model.parameters())
        for path in reversed(stack):
            if not path or path in self._paths or path in self._refused:
                continue
            module = model.get_submodule(path)
            alike = [name for name, other in model.named_modules() if type(other) is type(module) and name]
            alike = [name for name in alike if name not in self._refused]
            size = sum(p.numel() for name in alike for p in model.get_submodule(name).parameters())
            if size > _LARGEST * everything and not self.all_sizes:
                return False
            where = error.where or ""
            self._paths |= dict.fromkeys(alike, where)
            return True
        return False

    def notices(self) -> list[str]:
        """What the user should know of them."""
        if not self._paths:
            return []
        names, where = ", ".join(list(self._paths)[:4]), next(iter(self._paths.values()))
        more = f" and {len(self._paths) - 4} more" if len(self._paths) > 4 else ""
        return [
            f"{names}{more} cannot be captured ({where}), and run{'s' if len(self._paths) == 1 else ''} eagerly "
            "between captured segments: on every rank that has a part of it, for the whole micro-batch, twice."
        ]

    @contextmanager
    def around(self, model: nn.Module, *, allowed: bool) -> Iterator[None]:
        """While active, calls of islands are ops."""
        chosen = [path for path in self._paths if not any(o != path and _in(path, o) for o in self._paths)]
        if chosen and not allowed:
            raise CaptureError(
                f"the objective differentiates through {chosen[0]} ({self._paths[chosen[0]]}), which reads values.",
                fix="plans single, ddp and zero1-3 run it eagerly.",
                where=self._paths[chosen[0]],
            )
        with contextlib.ExitStack() as stack:
            for path in chosen:
                module = model.get_submodule(path)
                module.forward = self._caller(path, module)
                stack.callback(module.__dict__.pop, "forward", None)
            yield

    def _caller(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._call(path, module, args, kwargs)
            except NoIslandError:
                self.failed = path
                raise

        return forward

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        named = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [*named.values(), *buffers.values()]
        numbers = [leaf for leaf in leaves if type(leaf) is int]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        own = Island(
            owner=self._job,
            path=path,
            module=self._module(path),
            spec=spec,
            constants=tuple(
                NUMBER if type(leaf) is int else None if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ),
            is_tensor=tuple(isinstance(leaf, Tensor) for leaf in leaves),
            names=(*named, *buffers),
            written=tuple(buffers),
            autocast=autocast,
            dtype=torch.get_default_dtype(),
        )
        found = _probe(own, inputs, numbers)
        own = replace(own, written=found.written)
        first = len(inputs) - len(buffers)
        for index, name in enumerate(buffers, first):
            if name in found.written:  # the backward needs what it was
                inputs[index] = inputs[index].clone()
        results = iter(_Call.apply(own, tuple(numbers), found, *inputs))  # type: ignore[no-untyped-call]
        made = [next(results) if isinstance(leaf, _Shape) else leaf for leaf in found.leaves]
        with torch.no_grad():
            for name in found.written:
                buffers[name].copy_(next(results))
        return pytree.tree_unflatten(made, found.spec)

    def _module(self, path: str) -> nn.Module:
        """The user's own module, its parameters and buffers without memory."""
        if self._real is None:
            with without_modes(), kept_generators():
                model = self._job.build_model()
                model = copy_of(model) if model is self._job.model else model
                for module in model.train().modules():
                    for table in tables_of(module):
                        for name, tensor in table.items():
                            if tensor is not None:
                                table[name] = _without_memory(tensor)
            self._real = model
        return self._real.get_submodule(path)


def may_be_absent(gradient: fx.Node) -> bool:
    """Whether a gradient comes from an island alone, which may not have used its parameter."""
    source: Any = gradient.args[0] if gradient.target is operator.getitem else None
    return source is not None and source.target is ours.island_backward.default


def _in(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Call(torch.autograd.Function):
    """The op, and the op of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, own: Island, numbers: tuple[int, ...], found: _Outputs, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.call = (name_of(own), list(numbers))
        ctx.wanted = [i for i in found.wanted if ctx.needs_input_grad[3 + i]]
        ctx.num_returned = sum(isinstance(leaf, _Shape) for leaf in found.leaves)
        made = island(
            list(inputs),
            *ctx.call,
            [len(shape) for shape, _ in found.tensors],
            [extent for shape, _ in found.tensors for extent in shape],
            " ".join(str(dtype).removeprefix("torch.") for _, dtype in found.tensors),
        )
        ctx.mark_non_differentiable(*(t for t, moves in zip(made, found.moving, strict=True) if not moves))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        if ctx.wanted:
            given = list(ctx.saved_tensors), list(grads[: ctx.num_returned])
            made = island_backward(*given, *ctx.call, ctx.wanted)
            for index, gradient in zip(ctx.wanted, made, strict=True):
                gradients[index] = gradient
        return (None, None, None, *gradients)


@dataclass(frozen=True, slots=True)
class _Shape:
    shape: torch.Size
    dtype: torch.dtype


def _probe(own: Island, inputs: Sequence[Tensor], numbers: Sequence[int]) -> _Outputs:
    """Run the module on real tensors of these shapes, with zeros, any numbers and ones."""
    found = []
    for value in (0.0, None, 1.0):
        try:
            with at_most(_PROBE_S), without_modes(), kept_generators(), torch.enable_grad():
                found.append(_run(own, inputs, numbers, value))
        except NoIslandError:
            raise
        except Exception as error:  # ones may be no indices
            if value == 0.0:
                raise NoIslandError(f"{own.path} cannot be run on zeros ({error})") from error
    if any((f.leaves, f.spec, f.held) != (found[0].leaves, found[0].spec, found[0].held) for f in found):
        raise NoIslandError(f"what {own.path} returns, or writes, has other shapes for other values")
    written = tuple(name for name in own.written if any(name in f.written for f in found))
    return replace(
        found[-1],
        wanted=tuple(sorted({i for f in found for i in f.wanted})),
        written=written,
        tensors=(*found[0].tensors, *(found[0].held[own.written.index(name)] for name in written)),
        moving=(
            *(any(entry) for entry in zip(*(f.moving for f in found), strict=True)),
            *(False for _ in written),
        ),
    )


def _run(own: Island, inputs: Sequence[Tensor], numbers: Sequence[int], value: float | None) -> _Outputs:
    """`value`: of all elements; None: any."""
    leaves = []
    for tensor in inputs:
        real = torch.full(tuple(tensor.shape), value or 0.0, dtype=tensor.dtype)
        if value is None:
            real = (
                real.normal_() if real.is_floating_point() else (torch.rand(real.shape) < 0.5).to(real.dtype)
            )
        leaves.append(real.requires_grad_(tensor.requires_grad and real.is_floating_point()))
    versions = [version_of(leaf) for leaf in leaves]
    numbers_before = torch.get_rng_state()
    watch = Watch({"model": own.module})
    try:
        result, given, after = own.run(leaves, numbers)
        changed = [change for change in watch.changes() if change.tensor is None]
    finally:
        watch.restore()
    if changed:
        raise NoIslandError(f"{own.path} changes Python state, {changed[0].path}")
    if versions != [version_of(leaf) for leaf in leaves]:
        raise NoIslandError(f"{own.path} writes into its parameters, or into what it is given")
    made, spec = pytree.tree_flatten(result)
    if not torch.equal(numbers_before, torch.get_rng_state()):  # they would not be those of samples
        raise NoIslandError(f"{own.path} draws random numbers")
    tensors = [leaf for leaf in made if isinstance(leaf, Tensor)]
    if any(t.layout != torch.strided for t in tensors):
        raise NoIslandError(f"{own.path} returns a sparse tensor")
    moving = [t for t in tensors if t.requires_grad]
    asked = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    wanted: tuple[int, ...] = ()
    if moving and asked:
        grads = torch.autograd.grad(
            moving, [leaves[i] for i in asked], [torch.ones_like(t) for t in moving], allow_unused=True
        )
        wanted = tuple(i for i, gradient in zip(asked, grads, strict=True) if gradient is not None)
    written = tuple(name for name in own.written if version_of(after[name]) or after[name] is not given[name])
    return _Outputs(
        spec=spec,
        leaves=tuple(_Shape(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in made),
        written=written,
        held=tuple((after[name].shape, after[name].dtype) for name in own.written),
        tensors=tuple((t.shape, t.dtype) for t in tensors),
        moving=tuple(t.requires_grad for t in tensors),
        wanted=wanted,
    )
