"""A schedule for each of several optimizers.

Goes in: a job's `schedule`, one for all optimizers or one for each by name, and the optimizers. Comes out: what a
single `Schedule` is. A torch scheduler is made for every optimizer; a function of the step is scaled for all of their
groups.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from plait.errors import JobError
from plait.job.schedule import Schedule, takes_optimizer
from plait.job.updates.optimizers import Optimizers, members_of


class Schedules:
    """As many as there are optimizers; each is what `Schedule` says."""

    def __init__(self, schedules: "Mapping[str, Schedule | Schedules]") -> None:
        self._of = dict(schedules)

    def of(self, name: str) -> "Schedule | Schedules":
        """That of one optimizer."""
        return self._of[name]

    @property
    def moved(self) -> tuple[str, ...]:
        """Options that `apply` sets at every step."""
        return tuple(dict.fromkeys(key for one in self._of.values() for key in one.moved))

    def apply(self, optimizer: Optimizer, step: int) -> None:
        """Set step `step`'s rates on every group."""
        for name, member in members_of(optimizer).items():
            self._of[name].apply(member, step)

    @property
    def follows(self) -> bool:
        """Whether the rates of any depend on what is measured."""
        return any(one.follows for one in self._of.values())

    def observe(self, value: float) -> None:
        """What was measured, for those that follow it."""
        for one in self._of.values():
            one.observe(value)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: one.state_dict() for name, one in self._of.items()}

    def load_state_dict(self, state: Mapping[str, Any], steps_done: int) -> None:
        """Go on after so many steps of the run."""
        if set(state) != set(self._of):
            raise JobError(
                f"the job has the optimizers {sorted(self._of)}; the saved schedules are of {sorted(state)}.",
                fix="resume with the job that was saved, or start a new run.",
            )
        for name, one in self._of.items():
            one.load_state_dict(state[name], steps_done)


Given = Callable[..., Any] | Mapping[str, Callable[..., Any] | None] | Sequence[Callable[..., Any] | None]


def schedule_of(given: Given | None, optimizer: Optimizer) -> Schedule | Schedules:
    """The schedule of an optimizer, or of several."""
    if not isinstance(given, Mapping | Sequence):
        several = optimizer.members if isinstance(optimizer, Optimizers) else {}
        if several and given is not None and takes_optimizer(given, next(iter(several.values()))):
            return Schedules({name: Schedule(given, member) for name, member in several.items()})
        return Schedule(given, optimizer)
    members = members_of(optimizer)
    found = dict(given) if isinstance(given, Mapping) else {str(at): one for at, one in enumerate(given)}
    if "" in members or not set(found) <= set(members):
        raise JobError(
            f"schedule is for {', '.join(map(repr, found))}; the optimizers are "
            f"{', '.join(map(repr, members)) if '' not in members else 'one alone'}.",
            fix="name schedules as `optimizer` names what it returns: a pattern, a key, or a place in a list.",
        )
    return Schedules({name: Schedule(found.get(name), member) for name, member in members.items()})
