"""The Job: what is trained, in the user's own PyTorch.

Goes in: a network, data, a loss or an objective, an optimizer, and the few numbers that decide what is
computed. Comes out: a frozen value that cannot be built wrong, and the functions that make its model and
optimizer and compute what is minimized. Never here: how many ranks, which device, which plan.
"""

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from plait.errors import JobError
from plait.job import objective as _objective
from plait.job.build import build_model
from plait.job.data.torch_loader import loader_fields
from plait.job.fields import Problem, is_whole, job_problems, until_problems
from plait.job.order import Draws, SampleOrder, micro_batch_sizes, shares
from plait.job.precision import Precision, half_of, keep_masters
from plait.job.sampler import Sampler
from plait.job.schedule import Schedule
from plait.job.updates.average import Average
from plait.job.updates.clip import Bound
from plait.job.updates.follow import TRAIN_LOSS
from plait.job.updates.freeze import Freeze
from plait.job.updates.objectives import Objective, Turn, optimizers_of, schedules_of, turn_of
from plait.job.updates.optimizers import build_optimizer, leaves_of
from plait.job.updates.patterns import as_patterns, check_known
from plait.job.updates.schedules import Given, Schedules, schedule_of

_WHOLE = (
    "batch", "epochs", "steps", "seed", "accumulate", "evaluate_every", "workers", "prefetch", "skip_bad",
)  # fmt: skip
"""Fields that are whole numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Until:
    """Stop when a measured value is good enough, or does not improve any more."""

    metric: str = "loss"
    """`loss`, or a name in the job's `metrics`."""
    target: float | None = None
    """Stop when the value reaches this."""
    patience: int | None = None
    """Stop after this many evaluations without improvement."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""

    def __post_init__(self) -> None:
        _refuse("until", until_problems(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training job; everything that changes its numbers, and nothing about how it is run."""

    model: Callable[[], nn.Module] | nn.Module
    """A function that builds the network, or the network."""
    data: Any
    """The samples: a Dataset, a sequence, tensors, an iterable, a path to Parquet files or tar shards; or a function
    returning one. Or a DataLoader, whose batch, order, collate and workers count where the job does not say them."""
    loss: Callable[..., Any] | None = None
    """(output, target) -> scalar; a batch is (*inputs, target). Exactly one of `loss` and `objective` is given."""
    objective: Callable[..., Any] | None = None
    """(model, batch) -> scalar mean, or (total, weight) where total / weight over the whole batch is minimized."""
    objectives: Sequence[Objective] = ()
    """Instead of `loss` and `optimizer`: several objectives in turn, each with parameters and samples of its own."""
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None
    """(list of parameters) -> optimizer, or several; gets (name, parameter) pairs if its parameter is called
    `named_parameters`. Or one function for each pattern of names: {"encoder": ..., "*": ...}."""
    batch: int = 0
    """Samples per optimizer step, over all ranks; may be left out where `data` is a DataLoader."""
    epochs: int | None = None
    """Passes over the data; 1 when neither `epochs` nor `steps` is given."""
    steps: int | None = None
    """Optimizer steps, instead of `epochs`."""
    seed: int = 0
    """Decides the initial weights, the order of the samples and every random mask."""
    schedule: Given | None = None
    """step -> learning rate; or optimizer -> torch LRScheduler. Of several optimizers: for all of them, or one for
    each, by name."""
    follow: str | None = "loss"
    """What a ReduceLROnPlateau schedule follows: `loss` or a metric of evaluations, or every step's `train_loss`.
    None: nothing, so it stays where it begins."""
    clip_norm: Bound = None
    """Largest allowed norm of the gradient: of all parameters together, or of those of each pattern of names."""
    clip_value: Bound = None
    """Largest allowed absolute value in a gradient, for all parameters or by pattern; after `clip_norm`."""
    weights: str | Path | None = None
    """What the network begins with: a file of safetensors or a `state_dict`, the index of several, a Hugging Face
    folder; where it has no tensor of a name, as `model` made it. None: all as `model` made it."""
    trains: str | Sequence[str] | None = None
    """The only parameters that are trained, by name, module or wildcards; None: all that require gradients."""
    freeze: Sequence[Freeze] = ()
    """Parameters that are not trained for a while."""
    average: Average | None = None
    """Averaged weights that are kept beside, evaluated with and saved: EMA or SWA."""
    accumulate: int = 1
    """Micro-batches per step: the batch is split into this many consecutive slices."""
    precision: Precision = "fp32"
    """What the network computes in: `bf16` and `fp16` by autocast, fp16 with a loss scale; `fp8`: as bf16, with large
    weights multiplied in 8 bits. Weights are kept in fp32, with `bf16-weights` in bfloat16 beside fp32 masters in the
    optimizer."""
    metrics: Mapping[str, Callable[..., Any]] | None = None
    """Measured at evaluation: same arguments as `loss` or `objective`, -> scalar or (total, weight)."""
    evaluate: Any | None = None
    """Like `data`; read in its own order."""
    evaluate_every: int | None = None
    """Steps between evaluations; None: at the end of every epoch."""
    until: Until | None = None
    """When to stop early."""
    collate: Callable[[list[Any]], Any] | None = None
    """List of samples -> batch whose tensors have the samples on dim 0; None: torch's default_collate."""
    shuffle: bool = True
    """Whether each epoch gets its own order of samples; a stream is always read in its own."""
    lengths: Sequence[int] | None = None
    """The length of every sample: those of about the same length then share a step, so that little is padded."""
    work: Sequence[int] | None = None
    """What every sample costs, such as the vertices of its graph: the shares of a step then cost about the same."""
    sampler: Sampler | None = None
    """Says the order of an epoch, alike on any ranks: torch's Sampler (weighted, say), BatchSampler, epoch -> ids."""
    drop_last: bool = False
    """Whether samples of an epoch that do not fill a batch are left out."""
    workers: int = 0
    """Processes of each rank that read samples; 0: a thread does."""
    prefetch: int = 2
    """Shares of a step that each worker, or the thread, reads ahead."""
    skip_bad: int = 0
    """Damaged samples that are allowed on a rank: each is told, and the next one in the data takes its place."""
    batch_norm: Literal["global", "local"] = "global"
    """Statistics over the whole micro-batch, or over each rank's share."""

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader):
            for name, value in loader_fields(self.data, self).items():
                object.__setattr__(self, name, value)
        for name in _WHOLE:
            value = getattr(self, name)
            if is_whole(value):
                object.__setattr__(self, name, int(value))
        for name in ("lengths", "work"):
            if isinstance(value := getattr(self, name), Tensor):
                object.__setattr__(self, name, tuple(value.tolist()))
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1)
        _refuse("job", job_problems(self))

    def total_steps(self, num_samples: int | None) -> int | None:
        """Optimizer steps in the whole run; None when that depends on where a stream ends."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        order = self.order(num_samples)
        return None if order is None else order.first_step(self.epochs)

    def step_shares(self, num_samples: int | None, ranks: int) -> list[tuple[int, ...]]:
        """A full step of data of so many samples: for each micro-batch, the samples of each of `ranks`."""
        count = min(self.batch, num_samples or self.batch)
        return [shares(size, ranks) for size in micro_batch_sizes(count, self.accumulate)]

    def order(self, num_samples: int | None) -> SampleOrder | None:
        """The global order of the samples; None for a stream, which has its own."""
        if num_samples is None:
            return None
        return SampleOrder(
            num_samples=num_samples,
            batch=self.batch,
            accumulate=self.accumulate,
            seed=self.seed,
            shuffle=self.shuffle,
            lengths=None if self.lengths is None else tuple(self.lengths),
            work=None if self.work is None else tuple(self.work),
            sampler=self.sampler,
            drop_last=self.drop_last,
            draws=self.draws,
        )

    @property
    def draws(self) -> Draws:
        """Which batch of the order a step has."""
        steps = [not entry.same_draw for entry in self.objectives for _ in range(entry.repeat)]
        return Draws(own=tuple(steps) or (True,))

    def seed_everything(self) -> None:
        """Seed torch, random, and numpy where it is in use, from the job's seed."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(self.seed % 2**32)

    def build_model(self) -> nn.Module:
        """The network: built under the job's seed, or the given instance as it is."""
        return build_model(self)

    def build_optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The user's optimizer on these parameters, which must be the only ones that it uses."""
        made = (
            optimizers_of(self.objectives, named)
            if self.objectives
            else build_optimizer(self.optimizer, named)
        )
        if self.precision == "bf16-weights":
            for member in leaves_of(made):
                keep_masters(member)
        return made

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule | Schedules:
        """The learning rates of an optimizer that `build_optimizer` made."""
        if self.objectives:
            return schedules_of(self.objectives, optimizer)
        return schedule_of(self.schedule, optimizer)

    def turn(self, step: int) -> Turn:
        """Which objective a step is for."""
        return turn_of(self.objectives, step)

    def parts(self) -> "tuple[Job, ...]":
        """A job for each objective, with what it trains and how; of a job with one, itself."""
        return tuple(self.only(entry.name) for entry in self.objectives) or (self,)

    def only(self, name: str) -> "Job":
        """The job of one objective alone."""
        found = next((entry for entry in self.objectives if entry.name == name), None)
        if found is None:
            names = ", ".join(entry.name for entry in self.objectives) or "none"
            raise JobError(f"no objective is called {name!r}; there are: {names}.", fix="name one of these.")
        return replace(
            self.unmeasured(), objectives=(), objective=found.objective, trains=found.trains, optimizer=found.optimizer,
            schedule=found.schedule, clip_norm=found.clip_norm, clip_value=found.clip_value, freeze=(), average=None,
        )  # fmt: skip

    def unmeasured(self) -> "Job":
        """The same training without its evaluations, and without what they would change."""
        follow = self.follow if self.follow == TRAIN_LOSS else None
        return replace(self, evaluate=None, evaluate_every=None, metrics=None, until=None, follow=follow)

    def check_names(self, trained: Sequence[str]) -> None:
        """Refuse patterns that mean none of the `trained` parameters."""
        rules: Sequence[Any] = self.objectives or (self,)
        given = [(what, getattr(rule, what)) for rule in rules for what in ("clip_norm", "clip_value")]
        patterns = [(what, tuple(bound)) for what, bound in given if isinstance(bound, Mapping)]
        patterns += [("freeze", as_patterns(entry.parameters)) for entry in self.freeze]
        for what, known in patterns:
            check_known(what, known, trained)

    def in_steps(self, num_samples: int | None) -> "Job":
        """The same job on data of so many samples: what counts epochs counts steps."""
        if not self.freeze:
            return self
        order = self.order(num_samples)
        first_step = None if order is None else order.first_step
        return replace(self, freeze=[entry.in_steps(first_step) for entry in self.freeze])

    def frozen_in(self, step: int, names: Iterable[str]) -> frozenset[str]:
        """Which of these parameters are not trained in a step."""
        if not self.freeze:
            return frozenset()
        return frozenset(name for name in names if any(entry.holds(name, step) for entry in self.freeze))

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[None]:
        """Where the forward runs: torch.autocast for 16 bits, nothing for fp32. `objective_of` does not enter it."""
        half = half_of(self.precision)
        return (
            contextlib.nullcontext() if half is None else torch.autocast(device_type=device_type, dtype=half)
        )

    @property
    def norm_bound(self) -> Bound:
        """`clip_norm`; with fp16 the norm of all gradients is wanted in any case: it tells whether one overflowed."""
        if self.precision != "fp16":
            return self.clip_norm
        if self.clip_norm is None or isinstance(self.clip_norm, Mapping):
            return {**(self.clip_norm or {}), "*": (self.clip_norm or {}).get("*", math.inf)}
        return self.clip_norm

    def objective_of(self, model: Callable[..., Any], batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """What is minimized on this batch: a scalar mean, or (total, weight)."""
        if self.objectives:
            raise JobError(
                f"the job has {len(self.objectives)} objectives in turn; this looks at one.",
                fix=f"take one of them: job.only({self.objectives[0].name!r}).",
            )
        if self.objective is not None:
            return _objective.checked("objective", self.objective(model, batch))
        output, target = _objective.forward(model, batch)
        assert self.loss is not None
        return _objective.checked("loss", self.loss(output, target))

    @property
    def measured(self) -> list[str]:
        """What evaluations measure, by name."""
        return [*(() if self.objectives else ("loss",)), *(self.metrics or {})]

    def measures_of(self, model: Callable[..., Any], batch: Any) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """`loss` and every metric on this batch; in the loss form from one forward pass."""
        metrics = dict(self.metrics or {})
        given: tuple[Any, Any]
        measured: dict[str, Tensor | tuple[Tensor, Tensor]]
        if self.objectives:
            given, measured = (model, batch), {}
        elif self.objective is not None:
            given = (model, batch)
            measured = {"loss": self.objective_of(model, batch)}
        else:
            assert self.loss is not None
            given = _objective.forward(model, batch)
            measured = {"loss": _objective.checked("loss", self.loss(*given))}
        for name, metric in metrics.items():
            measured[name] = _objective.checked(f"metric {name}", metric(*given), numbers=True)
        return measured


def _refuse(noun: str, problems: list[Problem]) -> None:
    if problems:
        what = " ".join(f"{noun}: {problem.what}" for problem in problems)
        raise JobError(what, fix=" ".join(dict.fromkeys(problem.fix for problem in problems)))
