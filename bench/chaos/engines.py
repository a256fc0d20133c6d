"""Runs whose tasks an engine starts, on parts of this machine as hosts: torchrun, Open MPI's mpirun, Slurm's srun.

In: a case, the engines that are there. Out: an `EngineRun`, a run of several tasks, each a fresh interpreter
(`task.py`) that an engine started. Its processes are known by a mark in their environment.
"""

import json
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from examples.lectures.slurm import NoSlurmError, free_ports, two_nodes
from tests.ranks.hosts.hosts import ROOT, environment

from bench.chaos.cases import Case, Engine
from bench.chaos.runs import Run, everybody, kill

_MARK = "PLAIT_CHAOS_RUN"
JOIN_S = 40
"""For which tasks wait for one that was killed before it came."""
_KILL_S = 5
"""For which mpirun lets tasks save what they have, twice, always: its own default is a second."""
_BEGIN_S = 120.0
"""For an engine to start its tasks: what happens before is its own."""
_OWN_HOST = ("sh", "-c", 'PLAIT_HOST="host ${OMPI_COMM_WORLD_RANK}${SLURM_NODEID}" exec "$0" "$@"')
"""Makes a task believe that it is on a host of its own."""


def _torchrun(case: Case, task: list[str]) -> list[list[str]]:
    (port,) = free_ports(1)
    where = ["--nnodes", str(case.tasks), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--no-python", *where]
    return [[*start, "--node-rank", str(node), *task] for node in range(case.tasks)]


def _mpirun(case: Case, task: list[str]) -> list[list[str]]:
    more = ["--oversubscribe", "--allow-run-as-root", "--mca", "odls_base_sigkill_timeout", str(_KILL_S)]
    return [["mpirun", *more, "-n", str(case.tasks), *_OWN_HOST, *task]]


def _srun(case: Case, task: list[str]) -> list[list[str]]:
    return [["srun", "-N2", f"-n{case.tasks}", "--overcommit", *_OWN_HOST, *task]]


_COMMANDS: dict[Engine, Callable[[Case, list[str]], list[list[str]]]] = {
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "srun": _srun,
}


class Engines:
    """Those that are here; Slurm is started where it is installed, and ended with this."""

    def __init__(self, place: Path, stack: ExitStack, wanted: set[Engine]) -> None:
        self.lacking: dict[Engine, str] = {}
        self._environment: Mapping[str, str] = environment()
        if "mpirun" in wanted and shutil.which("mpirun") is None:
            self.lacking["mpirun"] = "needs mpirun: apt-get install openmpi-bin"
        if "srun" in wanted:
            place.mkdir()
            try:
                self._environment = stack.enter_context(two_nodes(place, self._environment))
            except NoSlurmError as error:
                self.lacking["srun"] = str(error)

    def start(self, case: Case, folder: Path, *, resume: bool) -> "EngineRun":
        """The tasks of one run."""
        return EngineRun(case, folder, resume=resume, environment=self._environment)


class EngineRun(Run):
    """One of them."""

    def __init__(self, case: Case, folder: Path, *, resume: bool, environment: Mapping[str, str]) -> None:
        assert case.engine is not None
        super().__init__(case, folder)
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._place = folder.parent / f"tasks-{time.monotonic_ns()}"
        self._place.mkdir(parents=True)
        task = [sys.executable, "-m", "bench.chaos.task", case.name, str(folder), str(self._place)]
        name, _, value = self._mark.partition("=")
        found = {**environment, name: value, "PLAIT_JOIN_S": str(JOIN_S)}
        with (self._place / "log").open("ab") as log:
            self._launchers = [
                subprocess.Popen(command, env=found, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)
                for command in _COMMANDS[case.engine](case, [*task, *(["resume"] if resume else [])])
            ]  # fmt: skip
        try:
            self._await_tasks(case.tasks)
        except BaseException:
            self.end()
            raise

    def _await_tasks(self, count: int) -> None:
        deadline = time.monotonic() + _BEGIN_S
        while len(self.tasks()) < count:
            assert time.monotonic() < deadline, (self._place / "log").read_text()
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        return self.tasks()[0]

    @property
    def launchers(self) -> list[int]:
        """Of the engine itself."""
        return [launcher.pid for launcher in self._launchers]

    def tasks(self) -> dict[int, int]:
        """Process ids by task, of those that have begun."""
        found = {}
        for path in self._place.glob("task-*.pid"):
            found[int(path.stem.removeprefix("task-"))] = int(path.read_text())
        return found

    def members(self) -> list[int]:
        """Whatever carries the mark."""
        mark, found = self._mark.encode(), []
        for pid, stat in everybody():
            with suppress(OSError):
                if stat[0] not in "ZX" and mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def ranks(self) -> list[int]:
        """What tasks have started, without the processes that watch over them."""
        tasks = set(self.tasks().values())
        return [pid for pid in self.members() if _parent(pid) in tasks and not _is_guardian(pid)]

    def tree(self, task: int) -> list[int]:
        """A task and all that it has started."""
        members = self.members()
        found = [self.tasks()[task]]
        for above in found:
            found += [pid for pid in members if _parent(pid) == above]
        return found

    def is_over(self) -> bool:
        """Whether the engine has ended, and all that it started: it may have been killed. A torchrun agent that waits
        for one that was, or that was interrupted, as it does for minutes, does not count: none of ours is left."""
        codes = [launcher.poll() for launcher in self._launchers]
        if any(codes) and not set(self.members()) - set(self.launchers):
            self.end()
            return True
        return None not in codes and not self.members()

    def ended(self) -> tuple[int, dict[str, Any]]:
        """What the first task has told, and complaints of others; -9 where it could not."""
        said = {
            path.stem: json.loads(text)
            for path in self._place.glob("told-*.json")
            if (text := path.read_text())
        }
        for told in said.values():
            if told.get("error") == "TRACEBACK":
                return 1, told
        first = said.get("told-0")
        if first is None:
            return -9, {"text": (self._place / "log").read_text()[-2000:]}
        return 1 if first.get("error") else 0, first

    def end(self) -> None:
        kill(self.members())
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_guardian(pid: int) -> bool:
    try:
        return b"-S\0-c" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
