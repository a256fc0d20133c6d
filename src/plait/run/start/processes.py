"""Starting worker processes on one host, by fork or as fresh interpreters.

In: the caller's `main` and what each worker is to have. Out: one `Process` per rank, not yet waited for.
It never starts a process that can outlive this one, and never runs the user's `__main__` a second time.

Fork is the default because it is fast (10 ms against the seconds of importing torch again) and takes lambdas,
closures, notebooks and already captured programs as they are. It is not possible after CUDA was initialized
here: a driver context does not survive a fork. OpenMP's pool of threads does not survive one either (a forked
child that opens a parallel region waits for threads that do not exist, seen with torch's libgomp), but the
pool can be given back before the fork; where that fails and workers want more than one thread, fresh
interpreters are started instead.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkProcess
from typing import Literal

import cloudpickle

from plait.errors import UsageError
from plait.processes import start_program, wait_for
from plait.run.start.board import Board
from plait.run.start.child import Child, Main, run_child
from plait.run.start.guardian import Guardian
from plait.run.start.memory_file import anonymous_file
from plait.run.start.packing import write_payload
from plait.run.start.process import Process

Start = Literal["auto", "fork", "spawn"]

_END_S = 5.0
"""For workers that were killed to be gone."""
_FILES, _FILES_A_RANK = 8, 8
"""Open at most beside those that are: for the run, and for each of its ranks."""
_OMP_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0: threads go, settings stay."""
_ENTRY = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from plait.run.start.processes import run_spawned; sys.exit(run_spawned(given))"
)


def choose_start(start: Start, threads: int) -> Literal["fork", "spawn"]:
    """Decide between fork and fresh interpreters; see the module's docstring for the reasons."""
    if start != "auto":
        return start
    if sys.platform != "linux" or _driver_is_open() or multiprocessing.current_process().daemon:
        return "spawn"  # a worker of a pool may not fork by multiprocessing
    return "fork" if release_openmp() or threads == 1 else "spawn"


def _driver_is_open() -> bool:
    # `torch.cuda.is_available()` is enough to open the driver, and `torch.cuda.is_initialized()` does not
    # tell. The open files do.
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                return True
        except OSError:
            continue
    return False


def release_openmp() -> bool:
    """Give this thread's OpenMP threads back, so that forked children make their own; False where that fails."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/maps") as maps:
        loaded = set(re.findall(r"/\S*/libgomp[^/\s]*", maps.read()))
    # Other runtimes (LLVM's, Intel's) register handlers and survive a fork by themselves.
    pauses = [getattr(ctypes.CDLL(path), "omp_pause_resource_all", None) for path in loaded]
    return all(pause is not None and pause(_OMP_PAUSE_SOFT) == 0 for pause in pauses)


def start_forked(main: Main, child: Child, read_end: int, close: list[int]) -> Process:
    """Fork one worker; `close` names the parent's descriptors that it must not keep."""

    def enter() -> None:
        gc.freeze()  # what the parent has left to collect stays its own: destructors may need threads that it alone has
        for file in close:
            os.close(file)
        sys.exit(run_child(child, main))

    release_openmp()
    process: ForkProcess = multiprocessing.get_context("fork").Process(
        target=enter, name=f"plait rank {child.rank}"
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of any native thread. The child uses none of them, and OpenMP's have been given
        # back.
        warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
        process.start()
    assert process.pid is not None

    def reap() -> int:
        process.join()
        return process.exitcode or 0

    return _parent_side(child, process.pid, read_end, reap)


def start_spawned(payload: int, child: Child, read_end: int) -> Process:
    """Start one worker in a fresh interpreter that finds its pickled `main` in the file `payload`."""
    given = json.dumps({"path": sys.path, "payload": payload, "child": asdict(child)})
    # -c, not multiprocessing's spawn: that one imports the user's __main__ again, which starts what we are
    # starting.
    keep = [child.pipe, child.stacks, child.board, child.line, payload]
    with open(os.devnull) as null:
        pid = start_program(
            [sys.executable, *[f"-W{option}" for option in sys.warnoptions], "-c", _ENTRY, given],
            {**os.environ, "OMP_NUM_THREADS": str(child.threads)},
            standard=(null.fileno(), 1, 2),
            keep=keep if child.reach is None else [*keep, child.reach],
        )
    return _parent_side(child, pid, read_end, lambda: wait_for(pid) or 0)


def _parent_side(child: Child, pid: int, read_end: int, reap: Callable[[], int]) -> Process:
    with suppress(PermissionError, ProcessLookupError):  # it already runs another program, or is gone
        os.setpgid(pid, pid)  # the worker does the same: whoever comes first
    os.set_blocking(read_end, False)
    return Process(rank=child.rank, pid=pid, pipe=read_end, stacks=child.stacks, reap=reap)


def run_spawned(given: dict[str, object]) -> int:
    """Be the worker: the other side of `start_spawned`."""
    fields, payload = given["child"], given["payload"]
    assert isinstance(fields, dict)
    assert isinstance(payload, int)
    pickled = os.pread(payload, os.fstat(payload).st_size, 0)  # pread: the ranks share the file's position
    os.close(payload)

    def main(seat: object) -> object:
        return cloudpickle.loads(pickled)(
            seat
        )  # inside run_child, so that what cannot be imported is reported

    return run_child(Child(**fields), main)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """All workers of one run."""

    processes: list[Process]
    """In the order of ranks; fewer while starting, and where those of other hosts are watched elsewhere."""
    board: Board
    """What they are doing."""
    ranks: int
    """How many there are to be, those of other hosts included."""

    def of(self, rank: int) -> Process:
        """The worker that is this rank."""
        return next(process for process in self.processes if process.rank == rank)


def require_files(ranks: int) -> None:
    """Refuse where this process may not have as many files open as so many ranks take; where the system lets it, allow
    it more."""
    needed = len(os.listdir("/dev/fd")) + _FILES + _FILES_A_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"this process may have {hard} files open; with {ranks} ranks it needs {needed}.",
            fix=f"ulimit -n {needed}, or use fewer ranks.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def start_crew(
    crew: Crew,
    main: Main,
    how: Literal["fork", "spawn"],
    *,
    threads: int,
    guardian: Guardian,
    local: range | None = None,
    secret: int | None = None,
    call: Callable[[int], socket.socket] | None = None,
) -> list[socket.socket]:
    """Start the `local` ranks, or all, into `crew.processes`; on an error those already started are in there, for the
    caller to end.

    Returns the parent's end of a socket to each; none where `call` gives a rank its line to a switchboard elsewhere.
    `secret`: what ranks with peers on other hosts inherit.
    """
    lines: list[socket.socket] = []
    payload = write_payload(main) if how == "spawn" else None
    try:
        for rank in range(crew.ranks) if local is None else local:
            if call is None:
                line, far_end = socket.socketpair()
                lines.append(line)
            else:
                far_end = call(rank)
            read_end, write_end = os.pipe()
            child = Child(
                rank=rank,
                ranks=crew.ranks,
                threads=threads,
                parent_pid=os.getpid(),
                line=far_end.fileno(),
                pipe=write_end,
                stacks=anonymous_file(f"plait-stacks-{rank}"),
                board=crew.board.file,
                reach=secret,
            )
            try:
                if payload is None:
                    others = [process.pipe for process in crew.processes]
                    ends = [end.fileno() for end in lines]
                    process = start_forked(
                        main, child, read_end, [guardian.fileno(), read_end, *ends, *others]
                    )
                else:
                    process = start_spawned(payload, child, read_end)
            finally:
                os.close(write_end)
                far_end.close()
            crew.processes.append(process)
            guardian.watch(process.pid)
            process.on_end = guardian.forget
        return lines
    except BaseException:
        for line in lines:
            line.close()
        raise
    finally:
        if payload is not None:
            os.close(payload)


def end_crew(crew: Crew) -> None:
    """End every worker and everything that it started; those of this host are reaped at return. Whoever waits for the
    files of other hosts waits for the end of their ranks too."""
    alive = [process for process in crew.processes if process.poll() is None]
    for process in alive:
        process.signal(signal.SIGKILL)
    here = [process for process in alive if not process.host]
    deadline = time.monotonic() + _END_S
    while any(process.poll() is None for process in here) and time.monotonic() < deadline:
        time.sleep(0.01)


def close_crew(crew: Crew) -> None:
    """Close the parent's descriptors, after `end_crew`."""
    for process in crew.processes:
        os.close(process.pipe)
        os.close(process.stacks)
    crew.board.close()
