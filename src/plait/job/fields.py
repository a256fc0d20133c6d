"""What each field of a Job or an Until may be.

Goes in: a value just built. Comes out: every problem with its fields, each with its fix. Types are not
trusted: this is where they are checked. Never calls the user's functions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from torch import nn

from plait.job.batch import describe
from plait.job.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong."""

    what: str
    """What is wrong, with the values."""
    fix: str
    """What to do about it."""


def is_whole(value: Any) -> bool:
    """An integer, numpy's included; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def until_problems(until: Any) -> list[Problem]:
    """Everything wrong with an Until by itself."""
    found = []
    if until.target is None and until.patience is None:
        found.append(
            Problem(what="neither target nor patience is given.", fix="give target=, patience=, or both.")
        )
    if until.target is not None and not _is_finite(until.target):
        found.append(Problem(what=f"target is {until.target!r}.", fix="give a finite number."))
    if until.patience is not None and not (is_whole(until.patience) and until.patience >= 1):
        found.append(Problem(what=f"patience is {until.patience!r}.", fix="give a whole number >= 1."))
    if until.mode not in ("min", "max"):
        found.append(Problem(what=f"mode is {until.mode!r}.", fix="use mode='min' or mode='max'."))
    return found


def job_problems(job: Any) -> list[Problem]:
    """Everything wrong with a Job by itself."""
    return [*_parts(job), *_numbers(job), *_choices(job), *_measuring(job)]


def _parts(job: Any) -> list[Problem]:
    found = []
    if not isinstance(job.model, nn.Module) and not callable(job.model):
        found.append(
            Problem(what=f"model is {describe(job.model)}.", fix="give a function that builds an nn.Module.")
        )
    if job.data is None:
        found.append(
            Problem(what="data is None.", fix="give a dataset, tensors, or a function that returns them.")
        )
    if job.objectives:
        return [*found, *_objectives(job)]
    if (job.loss is None) == (job.objective is None):
        given = (
            "neither loss nor objective is given."
            if job.loss is None
            else "both loss and objective are given."
        )
        found.append(
            Problem(
                what=given,
                fix="give exactly one: loss=(output, target) -> scalar, or objective=(model, batch).",
            )
        )
    for name in ("loss", "objective", "collate"):
        value = getattr(job, name)
        if value is not None and not callable(value):
            found.append(Problem(what=f"{name} is {describe(value)}.", fix=f"give {name} a function."))
    return [*found, *_rules(job)]


def _objectives(job: Any) -> list[Problem]:
    """Of a job that has several in turn."""
    entries = job.objectives
    if not isinstance(entries, Sequence) or not all(hasattr(entry, "repeat") for entry in entries):
        return [
            Problem(what=f"objectives is {describe(entries)}.", fix="give objectives=[Objective(...), ...].")
        ]
    found = [
        Problem(
            what=f"both objectives and {name} are given.",
            fix=f"leave out {name}: every objective has its own.",
        )
        for name in ("loss", "objective", "optimizer", "schedule", "clip_norm", "clip_value", "trains")
        if getattr(job, name) is not None
    ]
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        found.append(Problem(what=f"objectives are called {names}.", fix="give each a name of its own."))
    if entries[0].same_draw:
        found.append(
            Problem(
                what=f"objective {names[0]} is the first, and there is no draw before it to be the same.",
                fix="set same_draw of those after it.",
            )
        )
    if job.evaluate is not None and not job.metrics:
        found.append(
            Problem(
                what="several objectives are evaluated without metrics.",
                fix="give metrics={'name': function of (model, batch)}: which of the objectives would be the loss?",
            )
        )
    if job.collate is not None and not callable(job.collate):
        found.append(Problem(what=f"collate is {describe(job.collate)}.", fix="give collate a function."))
    return found


def _rules(job: Any) -> list[Problem]:
    found = []
    if not callable(job.optimizer) and not _are_callable(job.optimizer, Mapping):
        found.append(
            Problem(
                what=f"optimizer is {describe(job.optimizer)}.",
                fix="give a function of the parameters: lambda params: torch.optim.SGD(params, lr=0.1); or one for "
                "each pattern of names: {'encoder': ..., '*': ...}.",
            )
        )
    several = _are_callable(job.schedule, Mapping | Sequence, or_none=True)
    if job.schedule is not None and not callable(job.schedule) and not several:
        fix = "give schedule a function, or one for each of several optimizers."
        found.append(Problem(what=f"schedule is {describe(job.schedule)}.", fix=fix))
    for name in ("clip_norm", "clip_value"):
        value = getattr(job, name)
        bounds = list(value.values()) if isinstance(value, Mapping) else [value]
        named = not isinstance(value, Mapping) or (value and all(isinstance(p, str) and p for p in value))
        if value is not None and not (named and all(_is_finite(bound) and bound > 0 for bound in bounds)):
            found.append(
                Problem(
                    what=f"{name} is {value!r}.",
                    fix=f"give {name} a number > 0, or one for each pattern of names; or leave it out.",
                )
            )
    return found


def _are_callable(given: Any, kind: Any, *, or_none: bool = False) -> bool:
    if not isinstance(given, kind) or isinstance(given, str) or not given:
        return False
    entries = given.values() if isinstance(given, Mapping) else given
    return all(callable(entry) or (or_none and entry is None) for entry in entries)


def _numbers(job: Any) -> list[Problem]:
    found = []
    for name in ("batch", "epochs", "steps", "evaluate_every"):
        value = getattr(job, name)
        if (value is not None or name == "batch") and not (is_whole(value) and value >= 1):
            found.append(Problem(what=f"{name} is {value!r}.", fix=f"give {name} a whole number >= 1."))
    if job.epochs is not None and job.steps is not None:
        found.append(
            Problem(
                what=f"both epochs={job.epochs} and steps={job.steps} are given.", fix="give one of the two."
            )
        )
    if not is_whole(job.seed) or not 0 <= job.seed < 2**63:
        found.append(
            Problem(what=f"seed is {job.seed!r}.", fix="give seed a whole number from 0 to 2**63 - 1.")
        )
    for name, least in (("workers", 0), ("prefetch", 1), ("skip_bad", 0)):
        value = getattr(job, name)
        if not (is_whole(value) and value >= least):
            found.append(Problem(what=f"{name} is {value!r}.", fix=f"give {name} a whole number >= {least}."))
    if not is_whole(job.accumulate) or job.accumulate < 1:
        found.append(
            Problem(what=f"accumulate is {job.accumulate!r}.", fix="give accumulate a whole number >= 1.")
        )
    elif is_whole(job.batch) and job.batch >= 1 and job.accumulate > job.batch:
        found.append(
            Problem(
                what=f"accumulate={job.accumulate} is larger than batch={job.batch}: a micro-batch would be empty.",
                fix=f"set accumulate to at most {job.batch}, or a larger batch.",
            )
        )
    return found


def _choices(job: Any) -> list[Problem]:
    found = []
    for name, allowed in (("precision", PRECISIONS), ("batch_norm", ("global", "local"))):
        if getattr(job, name) not in allowed:
            options = " or ".join(repr(option) for option in allowed)
            found.append(Problem(what=f"{name} is {getattr(job, name)!r}.", fix=f"set {name} to {options}."))
    for name in ("shuffle", "drop_last"):
        if not isinstance(getattr(job, name), bool):
            found.append(
                Problem(what=f"{name} is {getattr(job, name)!r}.", fix=f"set {name} to True or False.")
            )
    if job.sampler is not None and not (callable(job.sampler) or hasattr(job.sampler, "__iter__")):
        found.append(
            Problem(what=f"sampler is {describe(job.sampler)}.", fix="give a torch Sampler, or epoch -> ids.")
        )
    if job.sampler is not None and job.lengths is not None:
        found.append(Problem(what="both sampler and lengths say the order.", fix="give one of the two."))
    if job.trains is not None and not (isinstance(job.trains, str | Sequence) and job.trains):
        found.append(
            Problem(what=f"trains is {describe(job.trains)}.", fix="name parameters: trains='head'.")
        )
    if not isinstance(job.freeze, Sequence) or not all(hasattr(entry, "until") for entry in job.freeze):
        found.append(
            Problem(
                what=f"freeze is {describe(job.freeze)}.",
                fix="give freeze=[Freeze(parameters=..., until=...)].",
            )
        )
    if job.average is not None and job.precision == "bf16-weights":
        found.append(
            Problem(
                what="average of weights that are kept in bfloat16 would lose what it averages.",
                fix="use precision='bf16', whose weights are float32, or drop average.",
            )
        )
    for name in ("lengths", "work"):
        given = getattr(job, name)
        numbers = isinstance(given, Sequence) and all(is_whole(n) and n >= 0 for n in given)
        if given is not None and not numbers:
            found.append(
                Problem(
                    what=f"{name} is {describe(given)}.", fix="give one whole number >= 0 for every sample."
                )
            )
    if job.lengths is not None and not job.shuffle:
        found.append(
            Problem(
                what="lengths with shuffle=False: samples are not put together by length.",
                fix="leave out one of the two.",
            )
        )
    return found


def _measuring(job: Any) -> list[Problem]:
    found = []
    names: list[Any] = []
    if job.metrics is not None and not isinstance(job.metrics, Mapping):
        found.append(
            Problem(what=f"metrics is {describe(job.metrics)}.", fix="give metrics={'name': function}.")
        )
    elif job.metrics is not None:
        names = list(job.metrics)
        wrong = [name for name in names if not isinstance(name, str) or not callable(job.metrics[name])]
        if wrong:
            found.append(
                Problem(what=f"metrics {wrong} are no functions.", fix="give metrics={'name': function}.")
            )
        if "loss" in names:
            found.append(
                Problem(
                    what="a metric is called loss, which is always measured.", fix="give it another name."
                )
            )
    if job.evaluate_every is not None and job.evaluate is None:
        found.append(
            Problem(
                what=f"evaluate_every={job.evaluate_every} without evaluate data.",
                fix="give evaluate=, or leave evaluate_every out.",
            )
        )
    losses = [] if job.objectives else ["loss"]  # of several objectives, metrics alone are measured
    if job.follow not in ["train_loss", "loss", *names, None]:
        found.append(
            Problem(
                what=f"follow is {job.follow!r}; there are {['train_loss', 'loss', *names]}.",
                fix="name one of these, or add the metric.",
            )
        )
    if job.average is not None and not hasattr(job.average, "decay"):
        found.append(Problem(what=f"average is {describe(job.average)}.", fix="give average=Average(...)."))
    if job.until is not None and not hasattr(job.until, "patience"):
        found.append(Problem(what=f"until is {describe(job.until)}.", fix="give until=Until(target=...)."))
    elif job.until is not None and job.until.metric not in [*losses, *names]:
        found.append(
            Problem(
                what=f"until follows the metric {job.until.metric!r}; there are {[*losses, *names]}.",
                fix="name one of these, or add the metric.",
            )
        )
    return found


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
