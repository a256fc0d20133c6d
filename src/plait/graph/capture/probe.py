"""What code of the user's does with tensors of given shapes, found by running it on made-up numbers.

In: an island, fake tensors of its inputs. Out: what it returns and writes, and what gradients go through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.graph.ops.island import Island
from plait.job.generators import kept_generators
from plait.job.model.watch import Watch
from plait.threads import at_most
from plait.torch_private import pytree
from plait.torch_private.autograd import version_of
from plait.torch_private.dispatch import without_modes

PROBE_S = 5.0
"""Of processor time: a module runs on made-up numbers in milliseconds, or its loop may never end on them."""


VALUES = (0.0, None, 1.0)
"""Of all elements; None: any numbers."""


class NoIslandError(Exception):
    """A module cannot be an island."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
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
    """Inputs that gradients are asked of: all, where there are any."""
    held: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of all its buffers, after the call."""


@dataclass(frozen=True, slots=True)
class Shape:
    shape: torch.Size
    dtype: torch.dtype


def probe(own: Island, inputs: Sequence[Tensor], numbers: Sequence[int]) -> Outputs:
    """Run the module on real tensors of these shapes, with zeros, any numbers and ones."""
    found = []
    for value in VALUES:
        try:
            with at_most(PROBE_S), without_modes(), kept_generators(), torch.enable_grad():
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


def made_up(inputs: Sequence[Tensor], value: float | None, seed: int = 0) -> list[Tensor]:
    """Real tensors of the same shapes; `value`: of all elements; None: any, the same on every rank."""
    made, numbers = [], torch.Generator().manual_seed(seed)
    for tensor in inputs:
        real = torch.full(tuple(tensor.shape), value or 0.0, dtype=tensor.dtype)
        if value is None and real.is_floating_point():
            real.normal_(generator=numbers)
        elif value is None:
            real = (torch.rand(real.shape, generator=numbers) < 0.5).to(real.dtype)
        made.append(real.requires_grad_(tensor.requires_grad and real.is_floating_point()))
    return made


def _run(own: Island, inputs: Sequence[Tensor], numbers: Sequence[int], value: float | None) -> Outputs:
    leaves = made_up(inputs, value)
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
    resized = [name for name in own.written if after[name].shape != given[name].shape]
    if resized:
        raise NoIslandError(f"{own.path} gives its buffer {resized[0]} another shape")
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
        # Other values may lead to other layers: what has no gradient then is told where it is computed.
        wanted = tuple(asked) if any(gradient is not None for gradient in grads) else ()
    written = tuple(name for name in own.written if version_of(after[name]) or after[name] is not given[name])
    return Outputs(
        spec=spec,
        leaves=tuple(Shape(t.shape, t.dtype) if isinstance(t, Tensor) else t for t in made),
        written=written,
        held=tuple((after[name].shape, after[name].dtype) for name in own.written),
        tensors=tuple((t.shape, t.dtype) for t in tensors),
        moving=tuple(t.requires_grad for t in tensors),
        wanted=wanted,
    )
