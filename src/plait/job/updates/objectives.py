"""Several objectives that are trained in turn, each with its own parameters, optimizer and samples.

Goes in: a job's `objectives`. Comes out: whose turn a step is. A step is one update of one objective, on samples that
are its own, the next batch in the job's order, or on those of the step before (`same_draw`). As in a loop that calls
`zero_grad` before each backward, parameters that an objective does not train get no gradient from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from plait.errors import JobError
from plait.job.fields import Problem, is_whole
from plait.job.schedule import Schedule
from plait.job.updates.clip import Bound
from plait.job.updates.optimizers import Named, Optimizers, build_optimizer, check_disjoint
from plait.job.updates.patterns import as_patterns, check_known, first_of, is_patterns
from plait.job.updates.schedules import Given, Schedules, schedule_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What is minimized in some of the steps, and how."""

    name: str
    """What it is called in records and checkpoints."""
    objective: Callable[..., Any]
    """(model, batch) -> scalar mean, or (total, weight), as a job's."""
    trains: str | Sequence[str]
    """The parameters that it trains: names, modules or wildcards. No other objective trains them."""
    optimizer: Callable[..., Any] | Mapping[str, Callable[..., Any]]
    """Of these parameters, as a job's."""
    repeat: int = 1
    """Steps in a row, each on samples of its own, before the next objective has its turn."""
    same_draw: bool = False
    """Whether its steps have the batch of the step before them, and draw none: that of the objective before."""
    schedule: Given | None = None
    """As a job's; the step that it is given counts the updates of this objective."""
    clip_norm: Bound = None
    """As a job's."""
    clip_value: Bound = None
    """As a job's."""

    def __post_init__(self) -> None:
        problems = objective_problems(self)
        if problems:
            raise JobError(
                " ".join(f"objective {self.name}: {p.what}" for p in problems),
                fix=" ".join(p.fix for p in problems),
            )


def objective_problems(objective: Objective) -> list[Problem]:
    """Everything wrong with it that its job does not check."""
    found = []
    if not isinstance(objective.name, str) or not objective.name:
        found.append(Problem(what=f"name is {objective.name!r}.", fix="give it a name."))
    if not is_patterns(objective.trains):
        found.append(
            Problem(what=f"trains is {objective.trains!r}.", fix="name parameters: trains='generator'.")
        )
    if not is_whole(objective.repeat) or objective.repeat < 1:
        found.append(Problem(what=f"repeat is {objective.repeat!r}.", fix="give repeat a whole number >= 1."))
    if not isinstance(objective.same_draw, bool):
        found.append(
            Problem(what=f"same_draw is {objective.same_draw!r}.", fix="set same_draw to True or False.")
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Whose a step is."""

    objective: int
    """Position among the job's objectives."""
    count: int
    """Updates of this objective before."""


def turn_of(objectives: Sequence[Objective], step: int) -> Turn:
    """Whose turn step `step` is; of a job with one objective, always the same."""
    if not objectives:
        return Turn(objective=0, count=step)
    rounds, place = divmod(step, sum(entry.repeat for entry in objectives))
    for position, entry in enumerate(objectives):
        if place < entry.repeat:
            return Turn(objective=position, count=rounds * entry.repeat + place)
        place -= entry.repeat
    raise AssertionError("a place in a round is somebody's")


def optimizers_of(objectives: Sequence[Objective], named: Named) -> Optimizers:
    """One for each objective, on its own of these parameters."""
    members: dict[str, Optimizer] = {}
    for entry in objectives:
        check_known(f"objective {entry.name}: trains", as_patterns(entry.trains), [name for name, _ in named])
        own = [(n, p) for n, p in named if first_of(as_patterns(entry.trains), n) is not None]
        members[entry.name] = build_optimizer(entry.optimizer, own)
    check_disjoint(members, named)
    return Optimizers(members)


def schedules_of(objectives: Sequence[Objective], optimizers: torch.optim.Optimizer) -> Schedules:
    """One for each objective."""
    assert isinstance(optimizers, Optimizers)
    made: dict[str, Schedule | Schedules] = {
        entry.name: schedule_of(entry.schedule, optimizers.members[entry.name]) for entry in objectives
    }
    return Schedules(made)
