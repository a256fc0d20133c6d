"""What runs inside a worker process, around the function that the caller gave.

In: a `Seat` and the caller's `main`. Out: lines of JSON on the pipe to the parent: events, then one result or
one error. It never prints, never lets an exception escape, and never outlives its parent.
"""

import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from plait.errors import PlaitError
from plait.processes import die_with_parent
from plait.run.start.board import Board, BoardSlot
from plait.run.wire.reach import Reach, Secret
from plait.run.wire.store import RunStore
from plait.threads import NO_MEMORY_STATUS

_BACKLOG_BYTES = 64 << 20
"""Of events that a rank keeps for a parent that does not read; what comes after is dropped, and told."""
_FLUSH_S = 5.0
"""For which a rank that ends waits until its parent has read its result."""
_REACH_S = 60.0
"""For a rank of another host to answer a call: its door has a thread of its own."""
_PIPE_BYTES = 1 << 20
"""Of the pipe to the parent: the most that Linux gives a user by default (fs.pipe-max-size)."""
_F_SETPIPE_SZ = 1031
"""Of `fcntl`: Python names it on Linux alone."""
_GIVE_LOOK_S = 0.01
"""Between two looks whether this rank is to write what it holds."""
LOST_SIGNAL = signal.SIGUSR2
"""By which the parent says that other ranks are lost."""
_COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|gloo|nccl|timed out|timeout|peer", re.IGNORECASE
)

Main = Callable[["Seat"], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """What one worker is given."""

    rank: int
    """This process, 0 to ranks - 1."""
    ranks: int
    """How many workers there are."""
    store: RunStore
    """The run's key-value store, and the way to the other ranks; reachable for nobody else."""
    board: BoardSlot
    """Where this rank says what it does."""
    emit: Callable[[dict[str, Any]], None]
    """Send a JSON-able dict to the parent's `on_event`; returns at once, also when the parent is slow."""

    def stop_requested(self) -> bool:
        """Tell whether the run should end; see `BoardSlot.stop_after` for an answer that is equal on all ranks."""
        return self.board.stop_requested()

    def wait_to_give(self) -> None:
        """Until this rank is asked to write what it holds; who is not asked is ended."""
        while not self.board.gives():
            time.sleep(_GIVE_LOOK_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """What the parent prepared for one worker; the descriptors are valid in the worker."""

    rank: int
    """This process."""
    ranks: int
    """How many there are."""
    threads: int
    """Threads within an operator."""
    parent_pid: int
    """Without this process the worker ends."""
    line: int
    """Socket to the parent's switchboard."""
    pipe: int
    """Write end of the pipe to the parent."""
    stacks: int
    """File into which Python stacks are dumped on SIGUSR1 and on a crash."""
    board: int
    """File of the board."""
    reach: int | None = None
    """File with what it takes to reach ranks of other hosts; None where there are none."""


class Outbox:
    """The worker's end of the pipe: lines leave in order, and what does not fit waits in memory."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._backlog = bytearray()
        self._dropped = 0
        self._lock = threading.Lock()
        os.set_blocking(pipe, False)

    def emit(self, event: dict[str, Any]) -> None:
        """Send one event without waiting for the parent."""
        self._put({"event": event}, limit=_BACKLOG_BYTES)

    def finish(self, message: dict[str, Any]) -> None:
        """Send the last line, and wait a few seconds until all of it has left."""
        if self._dropped:
            self._put({"event": {"event": "dropped", "count": self._dropped}})
        self._put(message)
        deadline = time.monotonic() + _FLUSH_S
        while self._backlog and time.monotonic() < deadline:
            time.sleep(0.005)
            with self._lock:
                self._push()

    def _put(self, message: dict[str, Any], limit: int | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if limit is not None and len(self._backlog) + len(line) > limit:
                self._dropped += (
                    1  # the parent has not read for a long time; a worker must not grow without end
                )
                return
            self._backlog += line
            self._push()

    def _push(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: os.write(self._pipe, self._backlog)]
        except BlockingIOError:
            pass
        except OSError:  # the parent is gone, and so will this process be
            self._backlog.clear()


def run_child(child: Child, main: Main) -> int:
    """Prepare this process, call `main`, send what comes of it, and return the exit status."""
    try:
        die_with_parent(child.parent_pid)
        outbox = Outbox(child.pipe)
        try:
            seat = _take_seat(child, outbox)
            line = {"result": main(seat)}
            json.dumps(line)  # a result that cannot travel is an error of `main`, with its name
        except BaseException as error:
            outbox.finish({"error": describe(error)})
            return 1
        seat.board.done()
        outbox.finish(line)
        return 0
    except MemoryError:  # not even enough to tell: the status does
        os._exit(NO_MEMORY_STATUS)


def _take_seat(child: Child, outbox: Outbox) -> Seat:
    _prepare(child)
    post = Board(child.board, child.ranks).slot_of(child.rank)
    reach = None if child.reach is None else Reach(child.rank, Secret.read(child.reach), _REACH_S)
    return Seat(
        rank=child.rank,
        ranks=child.ranks,
        store=RunStore(child.line, child.rank, meeting=post.meeting, reach=reach),
        board=post,
        emit=outbox.emit,
    )


def _prepare(child: Child) -> None:
    # A group of its own: the terminal's Ctrl-C reaches the parent alone, which asks the workers to stop; and
    # the parent can end a worker together with whatever that worker started. The session stays the
    # terminal's, so nothing is detached.
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Slurm and systemd ask all processes at once to end: that is for the parent to decide, who lets ranks save. What a
    # rank forks is its own.
    parent = os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(parent, signal.SIGTERM))
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))
    signal.signal(LOST_SIGNAL, signal.SIG_IGN)  # of ranks that have nothing to hand over
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    faulthandler.enable(file=child.stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=child.stacks, all_threads=True, chain=False)
    os.environ["OMP_NUM_THREADS"] = str(child.threads)
    torch.set_num_threads(child.threads)
    if sys.platform == "linux":
        import fcntl  # absent elsewhere

        with suppress(OSError):  # over the user's limit: the default size works too
            fcntl.fcntl(child.pipe, _F_SETPIPE_SZ, _PIPE_BYTES)


def describe(error: BaseException) -> dict[str, Any]:
    """Turn an exception into JSON: when, what kind, and either plait's own message or a traceback."""
    told: dict[str, Any] = {"at_ns": time.monotonic_ns(), "communication": is_communication(error)}
    told["timeout"] = (
        told["communication"] and re.search("timed out|timeout", str(error), re.IGNORECASE) is not None
    )
    # The first frame is ours, and says nothing to the user.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    told["traceback"] = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    if isinstance(error, PlaitError):
        told["classes"] = [kind.__name__ for kind in type(error).__mro__]
        told["what"] = error.what
        told["fields"] = {name: value for name, value in vars(error).items() if _is_plain(value)}
    return told


def is_communication(error: BaseException) -> bool:
    """Tell whether an error, or one that led to it, may be only the echo of another rank's failure."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, ConnectionError | torch.distributed.DistError):
            return True
        if type(link) is RuntimeError and _COMMUNICATION.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
