"""How many threads a rank computes with."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from plait.run.parent.ranks import threads_per_rank


def party(engine: str, local_tasks: int) -> Any:
    return SimpleNamespace(place=SimpleNamespace(engine=engine, local_tasks=local_tasks))


@pytest.mark.parametrize(
    ("ranks", "of", "processors", "usable", "asked", "threads"),
    [
        (2, None, 8, 8, None, 4),
        (2, None, 8, 4, None, 2),  # a container, taskset
        (2, None, 8, 8, "1", 1),
        (2, None, 8, 8, "3,2", 3),
        (2, None, 8, 8, "many", 4),
        (16, None, 8, 8, None, 1),
        (1, party("srun", 4), 8, 8, None, 2),
        (1, party("mpirun", 4), 8, 1, None, 1),  # bound to a core
        (1, party("torchrun", 4), 8, 8, "1", 2),  # torchrun's own 1
        (1, party("torchrun", 1), 8, 8, "1", 1),
    ],
)
def test_processors_are_shared_as_far_as_they_may_be_used(
    ranks: int,
    of: Any,
    processors: int,
    usable: int,
    asked: str | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(usable)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_per_rank(ranks, of) == threads
