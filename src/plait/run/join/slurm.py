"""What Slurm's srun tells a task."""

import re
from collections.abc import Mapping

from plait.run.join.place import Place, number

_NAME = "srun"
_MOST_HOSTS = 100_000
"""Of a list of hosts that is believed."""


def read(environment: Mapping[str, str]) -> Place | None:
    """The place of a task of a step; a batch script is none."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    hosts = expand(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    tasks = number(environment, _NAME, "SLURM_STEP_NUM_TASKS")
    counts = tasks_by_host(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    host = number(environment, _NAME, "SLURM_NODEID", 0)
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    return Place(
        engine=_NAME,
        task=number(environment, _NAME, "SLURM_PROCID"),
        tasks=tasks,
        local_tasks=counts[host] if host < len(counts) else 1,
        first=hosts[0] if hosts else None,
        run=f"{job} {step} {environment.get('SLURM_RESTART_COUNT', '0')}",
        mark="SLURM_PROCID",
    )


def expand(hosts: str) -> list[str]:
    """`n[0-2,07],login` as n0, n1, n2, n07, login."""
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", hosts):
        names = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            ends = [plain] if plain else _numbers(ranges)
            if len(names) * len(ends) > _MOST_HOSTS:
                return found
            names = [name + end for name in names for end in ends]
        found += names
    return found


def _numbers(ranges: str) -> list[str]:
    """`0-2,07` as 0, 1, 2, 07; the zeros in front are kept."""
    found: list[str] = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        if not high:
            found.append(low)
        elif low.isdigit() and high.isdigit() and int(high) - int(low) < _MOST_HOSTS:
            found += [str(value).zfill(len(low)) for value in range(int(low), int(high) + 1)]
    return found


def tasks_by_host(text: str) -> list[int]:
    """`2(x3),1` as 2, 2, 2, 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * min(int(times or 1), _MOST_HOSTS)
    return found
