"""Tasks of a run as barrier tasks of Spark: one a rank, all at once, on the executors of a session that is there.

In: a session, the command of a task, perhaps a DataFrame. Out: how each task ended and what it said. Rows go from each
partition to a file of the task that has it, and never through the driver.
"""

import importlib
import json
import os
import pickle
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

import cloudpickle

from plait.errors import UsageError
from plait.files.scratch import scratch_folder
from plait.run.engines.host import CALL, Ended, HostTask, Shipped, values_of
from plait.run.engines.request import Request

_LOOK_S = 0.5
"""Between two looks at whether Spark wants a task to end, or has room."""
_ROOM_S = 20.0
"""For executors that are started with a session to come."""
_ON_THIS_HOST = re.compile(r"local(\[.*\])?")
"""A session within this process and its children: nobody else has to reach it."""
_CLOSED = (
    ("spark.authenticate", "true"),  # by a secret that Spark makes up for itself, on no command line
    ("spark.driver.host", "127.0.0.1"),
    ("spark.driver.bindAddress", "127.0.0.1"),
    ("spark.ui.enabled", "false"),  # there, anybody could end the run
)
"""What such a session is told: by itself it listens to whoever reaches this host, and gives them the run's token."""
_KEPT_BYTES = 1 << 16
"""Of what a task said that comes back."""


def spark() -> Any:
    """The package."""
    try:
        return importlib.import_module("pyspark")
    except ImportError as error:
        raise UsageError("Spark needs the package pyspark.", fix="pip install 'plait[spark]'.") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkTask:
    """What every task does."""

    arguments: tuple[str, ...]
    """Of `plait`; or, with `entry`, of that."""
    shipped: Shipped | None
    variables: Mapping[str, str]
    entry: str | None = None
    """Python to run instead of plait's command line."""
    given: bytes = b""
    """What the task finds in the file that PLAIT_GIVEN names."""
    cwd: str = field(default_factory=os.getcwd)
    """The driver's folder, in which tasks run where they see it: files are where the command said."""

    def __call__(self, rows: Iterator[Any]) -> Iterator[Ended]:
        """On an executor."""
        context = importlib.import_module("pyspark").BarrierTaskContext.get()
        hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        task = int(context.partitionId())
        with scratch_folder() as folder:
            (folder / "given").write_bytes(self.given)
            count = _write_rows(folder / "rows", rows)
            counts = [int(text) for text in context.allGather(str(count))]
            names = [str(name) for name in context.allGather(os.uname().nodename)]
            variables = {
                **self.variables,
                "PLAIT_ENGINE": "Spark",
                "PLAIT_TASKS": str(len(hosts)),
                "PLAIT_TASK": str(task),
                "PLAIT_LOCAL_TASKS": str(names.count(names[task])),
                "PLAIT_FIRST_ADDRESS": hosts[0],
                "PLAIT_GIVEN": str(folder / "given"),
                "PLAIT_VALUE": str(folder / "value"),
                "PLAIT_ROWS": json.dumps({"path": str(folder / "rows"), "counts": counts, "own": task}),
            }
            with closing(HostTask(self.arguments, variables, self.shipped, self.cwd, self.entry)) as process:
                said, code = b"", None
                while code is None:
                    piece, code = process.read(_LOOK_S)
                    said = (said + piece)[-_KEPT_BYTES:]
            value = folder / "value"
            yield Ended(
                task=task, code=code, said=said.decode(errors="replace"),
                value=value.read_bytes() if value.exists() else None,
            )  # fmt: skip


def _write_rows(path: Path, rows: Iterable[Any]) -> int:
    """The rows of a partition, one after the other; how many there are."""
    count = 0
    with path.open("wb") as file:
        for row in rows:
            pickle.dump(row.asDict(recursive=True) if hasattr(row, "asDict") else row, file)
            count += 1
    return count


def run_on(session: Any, task: SparkTask, ranks: int, data: Any = None) -> list[Ended]:
    """Run all tasks at once; those of `data` each have a partition of it."""
    context = session.sparkContext
    _await_room(context, ranks)
    tasks = context.parallelize((), ranks) if data is None else data.repartition(ranks).rdd
    return sorted(tasks.barrier().mapPartitions(task).collect(), key=lambda ended: ended.task)


def _await_room(context: Any, ranks: int) -> None:
    """Wait for executors that are about to come; an error where Spark has no room for all tasks at once. By itself it
    tries again for ten minutes, and says so in its log alone."""
    inner = context._jsc.sc()
    profile = inner.resourceProfileManager().defaultResourceProfile()
    deadline = time.monotonic() + _ROOM_S
    while (room := int(inner.maxNumConcurrentTasks(profile))) < ranks:
        if time.monotonic() > deadline:
            raise UsageError(
                f"{ranks} ranks are {ranks} tasks at once, and Spark has room for {room}.",
                fix=f"use --ranks {room}, or more executors or cores (spark.executor.instances, spark.executor.cores)."
                if room
                else "start executors: there are none.",
            )
        time.sleep(_LOOK_S)


def session_here(master: str | None, ranks: int) -> Any:
    """The session that there is; else a new one, at `master` or on this host, where tasks have this Python."""
    spark()
    builder = importlib.import_module("pyspark.sql").SparkSession
    found = builder.getActiveSession()
    if found:
        return found
    where = master or f"local[{ranks}]"
    if where.startswith("local"):  # by itself it takes the first python3 on the path, torch or not
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    made = builder.builder.master(where).appName("plait")
    for name, value in _CLOSED if _ON_THIS_HOST.fullmatch(where) else ():
        made = made.config(name, value)
    return made.getOrCreate()


def run_command(request: Request, given: Mapping[str, str], show: Callable[[bytes], None]) -> int:
    """`plait ... --engine spark`: the exit status of the first rank, after what it said."""
    options = request.known("master")
    session = session_here(options.get("master"), request.ranks)
    task = SparkTask(
        arguments=request.arguments, shipped=Shipped.of(request.arguments), variables={**variables(), **given}
    )
    try:
        first = run_on(session, task, request.ranks)[0]
    finally:
        session.stop()
    show(first.said.encode())
    return first.code


def variables() -> dict[str, str]:
    """The token and the name of a new run."""
    return {"PLAIT_TOKEN": token_hex(32), "PLAIT_RUN_ID": uuid.uuid4().hex}


def call_everywhere(session: Any, function: Callable[[], Any], ranks: int) -> list[Any]:
    """What a function returns in a process of each task, by rank."""
    task = SparkTask(
        arguments=(), shipped=None, variables=variables(), entry=CALL, given=cloudpickle.dumps(function)
    )
    return values_of(run_on(session, task, ranks))
