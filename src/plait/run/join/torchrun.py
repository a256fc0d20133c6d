"""What torchrun, and whoever does as it does, tells a task."""

from collections.abc import Mapping

from plait.run.join.place import Place, number

_NAME = "torchrun"
_MARK = "TORCHELASTIC_RUN_ID"
"""Set by torchrun itself; the other variables also by people, Kubernetes and others, who need not stay."""


def read(environment: Mapping[str, str]) -> Place | None:
    """The place that WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and MASTER_ADDR name."""
    if "WORLD_SIZE" not in environment:
        return None
    tasks = number(environment, _NAME, "WORLD_SIZE")
    port = environment.get("MASTER_PORT", "")
    name = environment.get(_MARK, "")
    again = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    first = environment.get("MASTER_ADDR")
    return Place(
        engine=_NAME,
        task=number(environment, _NAME, "RANK", 0 if tasks == 1 else None),
        tasks=tasks,
        local_tasks=number(environment, _NAME, "LOCAL_WORLD_SIZE", 1),
        first=first,
        run=f"{name} {first} {port} {again}",
        mark=_MARK if _MARK in environment else None,
        is_rank=True,
        restarts=number(environment, _NAME, "TORCHELASTIC_MAX_RESTARTS", 0)
        > number(environment, _NAME, "TORCHELASTIC_RESTART_COUNT", 0),
    )
