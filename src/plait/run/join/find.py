"""The place of this process, whichever engine started it.

In: environment variables. Out: a `Place`, or None for a process that nobody started beside others.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from plait.run.join import given, mpi, slurm, torchrun
from plait.run.join.place import Place, checked, number

ENGINES: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    given.read,
    torchrun.read,
    mpi.read_open_mpi,
    mpi.read_mpich,
    slurm.read,
)
"""The innermost first: torchrun and mpirun may run within a step of Slurm."""


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Where this process is among others that were started with it."""
    place = task_of(environment)
    if place is None or place.tasks == 1:
        return None
    return checked(replace(place, first=environment.get("PLAIT_FIRST_ADDRESS", place.first)))


def ask_again(place: Place, environment: Mapping[str, str]) -> str:
    """Task 0 is lost of a run that goes on when it is started again: ask engines for that which do not do so by
    themselves; who starts it, in words."""
    if not place.restarts:
        return "start it by the same command"
    if place.engine == slurm.NAME:
        try:
            slurm.ask_again(environment)
        except OSError as error:
            job = environment["SLURM_JOB_ID"]
            return f"Slurm could not be asked to ({error}): start it, by scontrol requeue {job},"
    return f"{place.engine} starts it"


def ask_again_after_fault(environment: Mapping[str, str]) -> None:
    """Task 0 was asked to end, and has saved: where that was because the job's batch script was killed, which would be
    the end of the job, it is asked for again. A job that was cancelled, or is requeued by itself, is left alone."""
    place = task_of(environment)
    if place is not None and place.is_first and place.restarts and place.engine == slurm.NAME:
        slurm.ask_again(environment, if_runs=False)


def task_of(environment: Mapping[str, str]) -> Place | None:
    """The task of an engine that this process is, also where it is the only one."""
    place = next((place for read in ENGINES if (place := read(environment)) is not None), None)
    if place is None or "PLAIT_RANKS_EACH" not in environment:
        return place
    return replace(place, each=number(environment, place.engine, "PLAIT_RANKS_EACH"))
