"""A few forward passes of the user's code before a run, on a few samples.

In: a job, its samples. Out: what is known of its runs: which data it takes, whether its loss tells its weight,
which dims of its random numbers hold samples, whether shares add up to the whole. What cannot work at all is told
before any process starts.
"""

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from plait.errors import JobError, PlaitError
from plait.graph.ops.random import random_key
from plait.job.batch import Objects, describe, map_objects
from plait.job.data.source import Source
from plait.job.generators import kept_generators, noted_draws, seeded_alike
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.job.model.dtypes import leaf_dtype
from plait.job.model.watch import Watch
from plait.job.origin import RAISED, fix_of, told
from plait.job.reading import divisor_of, fixed_divisor, read_loss, total_and_weight
from plait.program.instructions import DrawnAt
from plait.run.eager.company import Company
from plait.run.eager.draws import SampleDraws, draws_of
from plait.run.eager.statistics import batch_norms
from plait.torch_private import pytree
from plait.torch_private.autograd import version_of
from plait.torch_private.intercept import intercepted
from plait.torch_private.ops import OpOverload


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerTrial:
    """What one forward tells of all."""

    narrow: bool
    """Whether float64 data must be given as float32."""
    weighs: bool
    """Whether the loss says what it is a mean of."""
    draws: tuple[DrawnAt, ...]
    """What is known of its draws of random numbers."""
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
    by_samples: bool = False
    """Whether its loss does not tell of several samples what it is a mean of."""


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
    mean: float
    """Its loss."""
    weight: float
    """What that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Few:
    """Some samples, as a share of a micro-batch."""

    batch: Any
    num_samples: int
    first: int = 0
    """How many of the micro-batch come before."""
    whole: int | None = None
    """Samples of the micro-batch; None: this is all of it."""
    known: tuple[DrawnAt, ...] = ()
    company: "_Before | None" = None
    """What was exchanged by those before."""
    fixed: float | None = None
    """What the loss divides a sum by."""
    by_samples: bool = False


def try_eagerly(job: Job, source: Source) -> EagerTrial:
    """Try the model and its loss, here and now."""
    error: BaseException | None = None
    two = _few(source, (0, 0))
    wide = any(
        isinstance(leaf, Objects) or (isinstance(leaf, Tensor) and leaf.dtype == torch.float64)
        for leaf in pytree.tree_leaves(two.batch)
    )
    for narrow, watched in ((False, True), (False, False), *(((True, True), (True, False)) if wide else ())):
        try:
            first = _try(job, two, narrow, watched)
        except PlaitError:
            raise
        except RAISED as found:  # without being watched, it fails as it does in the user's own loop
            error = found if error is None or not (narrow or watched) else error
            if "torch._dynamo" in sys.modules:  # compiled parts remember that they were watched
                torch.compiler.reset()
            continue
        if first.seeds and watched:  # what it draws is not for us to decide
            continue
        draws, fixed = _of_more(job, source, first, narrow, watched)
        return EagerTrial(
            narrow=narrow,
            weighs=first.weighs,
            draws=draws,
            other_draws=tuple(first.draws.others) if first.draws is not None else (),
            watched=watched,
            written=first.written,
            resized=first.resized,
            generators=first.generators,
            fixed=fixed,
            by_samples=_is_untold(job, source, first, narrow, watched),
        )
    assert error is not None
    raise JobError(
        f"the model or its loss failed on the first samples{_inside(error)}{told(error)}",
        fix=fix_of(error, "mend that line, or the shapes and dtypes of what it is given."),
    ) from error


def _of_more(
    job: Job, source: Source, first: _Forward, narrow: bool, watched: bool
) -> tuple[tuple[DrawnAt, ...], float | None]:
    """What is known of its draws, and what its loss divides by, from more samples."""
    draws, fixed = tuple[DrawnAt, ...](), None
    drawn = first.draws if first.draws is not None and first.draws.seen else None
    if drawn is None and first.divisor is None:
        return draws, fixed
    with contextlib.suppress(Exception):
        three = _few(source, (0, 0, 0))
        more = _try(job, three, narrow, watched)
        fixed = fixed_divisor(first.divisor, more.divisor)
        if drawn is not None and more.draws is not None:
            others = _few(source, _different(source))
            other = _try(job, others, narrow, watched)
            assert other.draws is not None
            draws = draws_of(drawn, more.draws, other.draws, alike=_shapes(three) == _shapes(others))
    return draws, fixed


def _is_untold(job: Job, source: Source, first: _Forward, narrow: bool, watched: bool) -> bool:
    """Means over as many elements, such as those of one sample taken twice, may differ for samples that do."""
    with contextlib.suppress(Exception):
        return not (first.weighs and _try(job, _few(source, _different(source)), narrow, watched).weighs)
    return False


def loss_in_shares(job: Job, source: Source, trial: EagerTrial) -> tuple[float, float] | None:
    """The loss of three samples, and that of a share of two and one of one; None where that does not tell.

    Batch norm knows the samples of all ranks, which one share after the other cannot.
    """
    ids = _different(source)
    try:
        with intercepted(((batch_norms(), _refuse),)):
            whole = _try(job, _few(source, ids, **_known(trial)), trial.narrow, trial.watched)
            shares = _shares(job, source, ids, trial)
    except Exception:  # what does not work is told elsewhere
        return None
    weight = sum(share.weight for share in shares)
    if weight <= 0 or not math.isfinite(whole.mean):
        return None
    return whole.mean, sum(share.mean * share.weight for share in shares if share.weight > 0) / weight


def _shares(job: Job, source: Source, ids: Sequence[int], trial: EagerTrial) -> list[_Forward]:
    company, made = _Before(), []
    for start, end in ((0, 2), (2, len(ids))):
        share = replace(
            _few(source, ids[start:end], **_known(trial)),
            first=start, whole=len(ids), company=company,
        )  # fmt: skip
        made.append(_try(job, share, trial.narrow, trial.watched))
    return made


def _known(trial: EagerTrial) -> dict[str, Any]:
    return {"known": trial.draws, "fixed": trial.fixed, "by_samples": trial.by_samples}


class _Before:
    """Company that has been where this rank is now, and gone: draws ask for no others."""

    def __init__(self) -> None:
        self._told: dict[str, list[Tensor]] = {}

    def gather_late(self, place: str, numbers: Tensor, turn: int) -> Tensor:
        """As `Company.gather_late`."""
        self._told.setdefault(place, []).append(numbers)
        return torch.stack(self._told[place])


def _refuse(op: OpOverload, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
    if given.get("training", given.get("train", True)):
        raise NotImplementedError
    return call()


def _few(source: Source, ids: Sequence[int], **known: Any) -> _Few:
    batch = source.fetch(torch.tensor(ids, dtype=torch.int64))
    return _Few(batch=batch, num_samples=len(ids), **known)


def _different(source: Source) -> tuple[int, ...]:
    """Three samples, different ones where there are so many, the same on every rank."""
    count = source.num_samples
    return (0, 1, 2) if count is None else (0, (count - 1) // 2, count - 1)


def _shapes(few: _Few) -> list[torch.Size]:
    return [leaf.shape for leaf in pytree.tree_leaves(few.batch) if isinstance(leaf, Tensor)]


def _inside(error: BaseException) -> str:
    """In which module, and what it was given, where one of torch's own was called without a line of the user's."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(module, nn.Module):
            values = [value for name, value in frame.f_locals.items() if name != "self"]
            tensors = [value for value in values if isinstance(value, Tensor)]
            given = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in tensors]
            given = given or [*map(describe, values)] or ["nothing"]
            return f" in {module}, which was given {', '.join(given)}" if not list(module.children()) else ""
    return ""


@kept_generators()
def _try(job: Job, few: _Few, narrow: bool, watched: bool) -> _Forward:
    model = job.build_model()
    model = copy_of(model) if model is job.model else model
    watch = Watch({"model": model, "loss": job.loss, "objective": job.objective})
    batch, num_samples = few.batch, few.num_samples
    key = random_key(seed=job.seed, step=0, first_sample=few.first)
    company = cast(Company | None, few.company)
    draws = SampleDraws(key, num_samples, model, few.known, company) if watched else None

    def given(leaf: Tensor) -> Tensor:
        return leaf.to(leaf_dtype(leaf.dtype, torch.float32, narrow), copy=True)

    if narrow:
        batch = pytree.tree_map_only(Objects, partial(map_objects, given), batch)
    before = {name: (version_of(p), p.data_ptr()) for name, p in model.named_parameters()}
    shapes = {name: buffer.shape for name, buffer in model.named_buffers()}
    torch.manual_seed(job.seed)
    try:
        with (
            seeded_alike(job.seed),
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
    total, weight = total_and_weight(job, batch, num_samples, result, few.whole, few.fixed, few.by_samples)
    counted = float(weight.detach())
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
        mean=float(total.detach()) / counted if counted else math.nan,
        weight=counted,
    )
