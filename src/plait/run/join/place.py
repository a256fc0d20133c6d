"""This process's place among the tasks of an engine.

In: environment variables, numbers. Out: a `Place`, which task of how many this is and where the first one is; or an
error in one line where the variables contradict each other or the ranks that are wanted. It never opens a socket.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One task of an engine."""

    engine: str
    """As a person calls it."""
    task: int
    """This one, from 0."""
    tasks: int
    """How many were started."""
    local_tasks: int
    """How many of them are on this host."""
    first: str | None
    """The host of task 0: a name or an address, or several with commas; None: the engine does not say."""
    run: str
    """Equal on all tasks of a run, and of no other run of this user."""
    mark: str | None = None
    """A variable that the engine sets in all tasks that it starts, and nobody else sets; None: whoever started this
    task may leave it."""
    is_rank: bool = False
    """Whether a task is a rank by the engine's own words; else a task may start the ranks of its host."""
    each: int | None = None
    """Ranks that a task has in an elastic run, however many tasks there are; None: those of the plan are shared."""
    restarts: bool = False
    """Whether the engine starts all tasks again where one is lost."""
    absent: int = 0
    """How many of them, the last ones, the run begins without: their hosts are lost, and may come back."""

    def ranks_each(self, ranks: int) -> int:
        """How many ranks each task has, of so many in all."""
        if ranks == self.tasks:
            return 1
        if self.is_rank:
            raise UsageError(
                f"the plan has {ranks} ranks, but {self.engine} started {self.tasks} tasks, each of which is one rank.",
                fix=f"use --ranks {self.tasks} (or leave it out), or start {ranks} tasks.",
            )
        if ranks % self.tasks or ranks < self.tasks:
            raise UsageError(
                f"the plan has {ranks} ranks, which {self.tasks} tasks of {self.engine} cannot share equally.",
                fix=f"use a multiple of {self.tasks} ranks, or start {ranks} tasks.",
            )
        if self.local_tasks > 1:
            raise UsageError(
                f"the plan has {ranks} ranks, but {self.engine} started {self.tasks} tasks, {self.local_tasks} of "
                "them on this host: a task starts several ranks only where it is alone on its host.",
                fix=f"start one task a rank ({ranks}), or one a host.",
            )
        return ranks // self.tasks

    @property
    def room(self) -> int | None:
        """Ranks that there can be in an elastic run, which follow the tasks; None: as many as the plan has."""
        return self.tasks if self.is_rank else None if self.each is None else self.each * self.tasks

    @property
    def is_first(self) -> bool:
        """Whether this task has the run folder, and talks to the person."""
        return self.task == 0


def number(environment: Mapping[str, str], engine: str, name: str, default: int | None = None) -> int:
    """A variable that an engine sets."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.strip().isdigit():
        said = "is not set" if text is None else f"is {text!r}, no number"
        raise UsageError(
            f"{engine} started this task, but {name} {said}.",
            fix=f"start it by {engine} itself, or unset what is left over of one.",
        )
    return int(text)


def checked(place: Place) -> Place:
    """Refuse a task that is none of those that there are."""
    if place.task >= place.tasks:
        raise UsageError(
            f"{place.engine} says that this is task {place.task} of {place.tasks}; the last one is {place.tasks - 1}.",
            fix="unset what is left over of another start, or set both anew.",
        )
    return place
