"""One forward pass of the user's code before a run, on a few samples.

In: a job, two small batches. Out: what is known of its runs: which data it takes, whether its loss tells its weight,
which dims of its random numbers hold samples. What cannot work at all is told before any process starts.
"""

import contextlib
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import JobError, PlaitError
from plait.graph.ops.random import random_key
from plait.job.batch import Objects, map_objects
from plait.job.generators import kept_generators, noted_draws
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.job.model.dtypes import leaf_dtype
from plait.job.model.watch import Watch
from plait.job.origin import fix_of, told
from plait.job.reading import divisor_of, fixed_divisor, read_loss
from plait.run.eager.draws import SampleDraws, shapes_of
from plait.torch_private import pytree
from plait.torch_private.autograd import version_of
from plait.torch_private.intercept import intercepted


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerTrial:
    """What one forward tells of all."""

    narrow: bool
    """Whether float64 data must be given as float32."""
    weighs: bool
    """Whether the loss says what it is a mean of."""
    draw_shapes: tuple[tuple[int, ...], ...] | None
    """Of its draws of random numbers, -1 in the place of the dim that holds samples; None: not known."""
    other_draws: tuple[str, ...]
    """Random ops whose numbers depend on the shares."""
    watched: bool = True
    """Whether the code can run while its ops are watched."""
    written: tuple[str, ...] = ()
    """Parameters that the forward itself writes into."""
    resized: tuple[str, ...] = ()
    """Buffers that the forward gives another shape."""
    generators: tuple[str, ...] = ()
    """Generators of the process besides torch's that it draws from."""
    fixed: float | None = None
    """What its loss divides a sum by in shares of any size; 0: by what a share counts; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    weighs: bool
    draws: SampleDraws | None
    """What was drawn; None: it runs only where its ops are not watched."""
    written: tuple[str, ...]
    resized: tuple[str, ...]
    seeds: bool
    """Whether it says itself what torch is to draw."""
    generators: tuple[str, ...]
    """Generators besides torch's that it draws from."""
    divisor: float | None
    """What its loss divides a sum by."""


def try_eagerly(job: Job, batch: Any, num_samples: int, more: Any, num_more: int) -> EagerTrial:
    """Try the model and its loss on a batch, and on one with more samples, here and now."""
    error: Exception | None = None
    wide = any(
        isinstance(leaf, Objects) or (isinstance(leaf, Tensor) and leaf.dtype == torch.float64)
        for leaf in pytree.tree_leaves(batch)
    )
    for narrow, watched in ((False, True), (False, False), *(((True, True), (True, False)) if wide else ())):
        try:
            first = _try(job, batch, num_samples, narrow, watched)
        except PlaitError:
            raise
        except Exception as found:  # without being watched, it fails as it does in the user's own loop
            error = found if error is None or not (narrow or watched) else error
            if "torch._dynamo" in sys.modules:  # compiled parts remember that they were watched
                torch.compiler.reset()
            continue
        if first.seeds and watched:  # what it draws is not for us to decide
            continue
        shapes: tuple[tuple[int, ...], ...] | None = () if first.draws is not None else None
        drawn = first.draws if first.draws is not None and first.draws.shapes else None
        shapes, fixed = shapes if drawn is None else None, None
        if drawn is not None or first.divisor is not None:
            with contextlib.suppress(Exception):
                other = _try(job, more, num_more, narrow, watched)
                fixed = fixed_divisor(first.divisor, other.divisor)
                if drawn is not None and other.draws is not None:
                    shapes = shapes_of(drawn.shapes, other.draws.shapes)
        return EagerTrial(
            narrow=narrow,
            weighs=first.weighs,
            draw_shapes=shapes,
            other_draws=tuple(first.draws.others) if first.draws is not None else (),
            watched=watched,
            written=first.written,
            resized=first.resized,
            generators=first.generators,
            fixed=fixed,
        )
    assert error is not None
    raise JobError(
        f"the model or its loss failed on the first samples{_inside(error)}{told(error)}",
        fix=fix_of(error, "mend that line, or the shapes and dtypes of what it is given."),
    ) from error


def _inside(error: BaseException) -> str:
    """In which module, and what it was given, where one of torch's own was called without a line of the user's."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            given = [
                f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
                for value in frame.f_locals.values()
                if isinstance(value, Tensor)
            ]
            return f" in {module}, which was given {', '.join(given)}" if not list(module.children()) else ""
    return ""


@kept_generators()
def _try(job: Job, batch: Any, num_samples: int, narrow: bool, watched: bool) -> _Forward:
    model = job.build_model()
    model = copy_of(model) if model is job.model else model
    watch = Watch({"model": model, "loss": job.loss, "objective": job.objective})
    draws = SampleDraws(random_key(seed=job.seed, step=0), num_samples) if watched else None

    def given(leaf: Tensor) -> Tensor:
        return leaf.to(leaf_dtype(leaf.dtype, torch.float32, narrow), copy=True)

    if narrow:
        batch = pytree.tree_map_only(Objects, partial(map_objects, given), batch)
    before = {name: (version_of(p), p.data_ptr()) for name, p in model.named_parameters()}
    shapes = {name: buffer.shape for name, buffer in model.named_buffers()}
    torch.manual_seed(job.seed)
    try:
        with (
            noted_draws() as told,
            torch.enable_grad(),
            job.autocast("cpu"),
            intercepted(draws.takers() if draws is not None else ()),
        ):
            result = job.objective_of(model.train(), pytree.tree_map_only(Tensor, given, batch))
            generators = watch.generators()
        after = {name: (version_of(p), p.data_ptr()) for name, p in model.named_parameters()}
    finally:
        watch.restore()
    weighs = not isinstance(result, Tensor) or read_loss(result, num_samples) is not None
    written = tuple(name for name, was in before.items() if after.get(name) != was)
    resized = tuple(
        name for name, buffer in model.named_buffers() if shapes.get(name, buffer.shape) != buffer.shape
    )
    return _Forward(
        weighs=weighs,
        draws=draws,
        written=written,
        resized=resized,
        seeds=any("seeds" in t for t in told),
        generators=generators,
        divisor=divisor_of(result) if isinstance(result, Tensor) else None,
    )
