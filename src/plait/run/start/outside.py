"""Processes that somebody else has started beside this one: torchrun, Slurm's srun, mpirun.

In: environment variables. Out: nothing, or the error that says what would happen, and what to do.
"""

from collections.abc import Mapping

from plait.errors import UsageError

_TASKS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),
}
"""What a starter tells each of its tasks: how many there are, and which of them it is."""


def refuse_many_starts(environment: Mapping[str, str]) -> None:
    """A run that starts its own ranks must be started once, not once in every task."""
    found = _tasks(environment)
    if found is not None:
        starter, count = found
        raise UsageError(
            f"{starter} started {count} tasks, and each of them would start a whole run with ranks of its own.",
            fix=f"start one task (plait starts its ranks itself: --ranks {count}), or use plait.parallelize in a loop "
            "of your own under torchrun.",
        )


def refuse_unnamed_peers(environment: Mapping[str, str]) -> None:
    """Tasks that do not know how to find each other would each train a model of their own."""
    found = _tasks(environment)
    if found is not None and "WORLD_SIZE" not in environment:
        starter, count = found
        raise UsageError(
            f"{starter} started {count} tasks, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set: each "
            "would train a model of its own.",
            fix="start them with torchrun (srun torchrun ...), set these four, or call "
            "torch.distributed.init_process_group first.",
        )


def _tasks(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Who started several tasks, and how many."""
    for starter, (size, place) in _TASKS.items():
        count = environment.get(size, "")
        if count.isdigit() and int(count) > 1 and place in environment:
            return starter, int(count)
    return None
