"""What Slurm's srun tells a task."""

import re
from collections.abc import Mapping

from plait.processes import run_program
from plait.run.join.place import Place, number

NAME = "srun"
_ANSWER_S = 60.0
"""For Slurm to answer."""
_MOST_HOSTS = 100_000
"""Of a list of hosts that is believed."""


def read(environment: Mapping[str, str]) -> Place | None:
    """The place of a task of a step; a batch script is none."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    hosts = expand(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
    tasks = number(environment, NAME, "SLURM_STEP_NUM_TASKS")
    counts = tasks_by_host(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    host = number(environment, NAME, "SLURM_NODEID", 0)
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    return Place(
        engine=NAME,
        task=number(environment, NAME, "SLURM_PROCID"),
        tasks=tasks,
        local_tasks=counts[host] if host < len(counts) else 1,
        first=hosts[0] if hosts else None,
        run=f"{job} {step} {environment.get('SLURM_RESTART_COUNT', '0')}",
        mark="SLURM_PROCID",
        restarts=asks_again(environment),
    )


def asks_again(environment: Mapping[str, str]) -> bool:
    """Whether the job's batch script is one that can be run again, and wants it where its own node is lost."""
    return environment.get("PLAIT_REQUEUE", "") not in ("", "0") and "SLURM_JOB_ID" in environment


def ask_again(environment: Mapping[str, str]) -> None:
    """Have Slurm run the batch script again. One whose first node is lost, told to go on without nodes, it keeps as
    running with nothing in it. A job that does not run any more is left alone: it was cancelled, or another task has
    asked. Raises OSError where Slurm does not do it."""
    job = environment["SLURM_JOB_ID"]
    if _told("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING":
        _told("scontrol", "requeue", job)


def _told(*command: str) -> str:
    done = run_program(list(command), patience_s=_ANSWER_S)
    if done.status:
        raise OSError(f"{command[0]}: {done.err.strip()}")
    return done.out.strip()


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
