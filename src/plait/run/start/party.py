"""The tasks that an engine started as one run, from the side of each of them.

In: the environment. Out: `First` or `Follower`, made once a process; None where nobody started this process beside
others.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch

from plait.errors import EchoError, PlaitError, UsageError
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.run.join.find import find_place
from plait.run.join.place import Place
from plait.run.join.starter import end_with_starter
from plait.run.join.token import run_token
from plait.run.start.launch import GroupKind, connect_by
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower
from plait.version import VERSION

_JOIN_S = 60.0
"""For all tasks to come, which an engine starts within moments; imports and busy hosts take the rest."""
TIMEOUT_S = 1800.0
"""How long a rank of a user's own loop waits for another before it gives up, as torch's process groups do."""
_TELLS_S = 10.0
"""The same where one of them has only to say what is wrong."""
_joined: dict[int, First | Follower] = {}
"""This process's party, by process id: a fork has none."""
_apart: set[int] = set()
"""Processes that have tried to meet the others: where they did not come, they are not waited for again."""


def place_here() -> Place | None:
    """This process's place, where an engine started it."""
    return find_place(os.environ)


def patience_s(environment: Mapping[str, str]) -> float:
    """How long tasks wait for each other."""
    text = environment.get("PLAIT_JOIN_S", str(_JOIN_S))
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(
            f"PLAIT_JOIN_S={text!r} is no number of seconds.", fix="use PLAIT_JOIN_S=60."
        ) from error


def ranks_wanted(
    place: Place | None, plan: object, ranks: int | None, mesh: Mapping[str, int] | None
) -> int | None:
    """Of a named plan without a number of ranks: as many as there are tasks."""
    is_named = plan is None or (isinstance(plan, str) and not plan.endswith((".yaml", ".yml")))
    return place.tasks if place is not None and ranks is None and not mesh and is_named else ranks


def facts_of(job: Job, plan: Plan, **more: object) -> dict[str, object]:
    """What must be the same on all tasks, in words that a person understands."""
    digest = sha256(plan.to_yaml().encode()).hexdigest()[:8]
    axes = ",".join(f"{name}={size}" for name, size in plan.mesh.axes)
    numbers = {name: getattr(job, name) for name in ("batch", "accumulate", "seed", "steps", "epochs")}
    return {
        "version of plait": VERSION,
        "version of torch": torch.__version__,
        "plan": f"{plan.name} ({axes}; {digest})",
        **numbers,
        **more,
    }


@contextmanager
def telling(party: First | Follower | None) -> Iterator[None]:
    """Where task 0 fails in the block, the others are told that it has told why."""
    if not isinstance(party, First):
        yield
        return
    party.owes_end = True
    try:
        yield
    except BaseException as error:
        party.end(None, error)
        raise


@contextmanager
def told_once() -> Iterator[None]:
    """What is wrong before tasks do anything together, also before they have met, is told by task 0, for all."""
    try:
        yield
    except EchoError:
        raise
    except PlaitError as error:
        party = _met()
        if isinstance(party, Follower) and not party.has_begun:
            party.fail(error)
        if isinstance(party, First) and party.told is not error:
            with telling(party):
                raise
        raise


def _met() -> First | Follower | None:
    """The other tasks of this one, which may have to be found first; None: there are none, or they do not come."""
    found = _joined.get(os.getpid())
    if found is None:
        with suppress(PlaitError):
            place = place_here()
            apart = place is None or os.getpid() in _apart
            return None if apart or place is None else join(place, None, within_s=_TELLS_S)
    return found


def has_met() -> bool:
    """Whether this process and the other tasks have met."""
    return os.getpid() in _joined


def join(
    place: Place, ranks: int | None, *, outlives: bool = False, within_s: float | None = None
) -> First | Follower:
    """Meet the other tasks, the first time, for which there is a limit; `ranks` are wanted in all, None: nobody knows.

    From then on this process ends when what started it is gone: it asks all to save and end, or, where the run
    `outlives` a host, it is lost to the others.
    """
    if os.getpid() not in _joined:
        if place.mark is not None:
            told = f"{place.engine}, which started task {place.task}, is gone: the task ends."
            end_with_starter(place.mark, asks=place.is_first or not outlives, told=told)
        token = run_token(place, os.environ, Path.home())
        make = First if place.is_first else Follower
        _apart.add(os.getpid())
        _joined[os.getpid()] = make(place, token, os.environ, within_s or patience_s(os.environ))
    party = _joined[os.getpid()]
    if isinstance(party, Follower):
        party.outlives = outlives
    try:
        place.ranks_each(place.tasks if ranks is None else ranks)
    except (
        UsageError
    ) as error:  # told once all are there: who ends before takes task 0 along, under most engines
        if isinstance(party, Follower):
            party.fail(error)
        with telling(party):
            raise
    return party


def agree(facts: Mapping[str, object]) -> None:
    """See that all tasks, each of which is a rank of a loop of the user's own, are about to do the same; task 0 tells
    what differs. Nothing where there are no others."""
    place = place_here()
    if place is None:
        return
    party = join(place, place.tasks)
    if isinstance(party, Follower):
        party.begin(facts)
        party.has_begun = False
        return
    with telling(party):
        party.begin(facts, TIMEOUT_S)
    party.release()


def meet(backend: GroupKind, timeout_s: float) -> Place | None:
    """Join torch.distributed with the other tasks, each of which is a rank; None where there are none."""
    place = place_here()
    if place is not None:
        store = join(place, place.tasks).own_store(timeout_s)
        connect_by(store, place.tasks, backend, timeout_s=timeout_s)
    return place
