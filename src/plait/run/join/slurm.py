"""What Slurm's srun tells a task."""

import re
import time
from collections.abc import Mapping

from plait.processes import run_program
from plait.run.join.place import Place, number

NAME = "srun"
_ANSWER_S = 60.0
"""For Slurm to answer."""
_TRIES_S = 20.0
"""For which it is asked again where it does not answer: it is busy, or another controller takes over."""
_AGAIN_S = 2.0
"""Between two tries."""
_FAULTS = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
"""Reasons of a job that Slurm ends as its batch script, or what that waits for, was killed; one that is cancelled has
none."""
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


def ask_again(environment: Mapping[str, str], *, if_runs: bool = True) -> None:
    """Have Slurm run the batch script again. One whose first node is lost, told to go on without nodes, it keeps as
    running with nothing in it; one whose batch script was killed it ends. Another job that does not run any more is
    left alone: it was cancelled, or another task has asked. `if_runs`: also one that runs. Raises OSError where Slurm
    does not do it."""
    job, deadline = environment["SLURM_JOB_ID"], time.monotonic() + _TRIES_S
    while True:
        try:
            said = _told("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r")
            state, _, reason = said.partition("|")
            if (state == "RUNNING" and if_runs) or reason.startswith(_FAULTS):
                _told("scontrol", "requeue", job)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)


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
