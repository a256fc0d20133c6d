"""Finding ranks that wait for each other in vain, and telling where the missing ones are.

In: the board. Out: a `Hang` (`find_hang`, a pure function), and its text with the missing ranks' Python
stacks. It never calls a long computation a hang as long as nobody waits for it.
"""

import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from plait.errors import HangError
from plait.run.start.board import Entry, State
from plait.run.start.child import run_child
from plait.run.start.process import Process
from plait.units import format_seconds

_ANSWER_S = 2.0
"""For a rank to write its stack: the handler runs at once, unless the process is stopped."""
_ASK_EVERY_S = 0.25
"""Between two requests for a stack: one that was stopped as it was born has no handler yet."""
_STOPPED_S = 10.0
"""A rank that was stopped for longer is given up, where nobody has asked for less patience."""
_STACK_LINES = 60
"""Of a stack that are shown: the innermost ones."""
_OUTER_FRAME = re.compile(rf'{re.escape(run_child.__code__.co_filename)}", line \d+ in {run_child.__name__}')
"""The frame from which the user's code is called: those around it are ours."""
_OWN_THREAD = re.compile(r'run/wire/(peers|group)\.py", line \d+ in (_attend|_work)$')
"""Threads of ours that wait for something to do."""
_PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep: a device or a network file system does not answer",
    "T": "stopped by a signal, SIGSTOP or one of the terminal",
    "t": "stopped by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long ranks may wait for one that does not come."""

    hang_s: float
    """For one that is busy."""

    @property
    def stopped_s(self) -> float:
        """For one that was stopped by a signal: it will not come by itself."""
        return min(self.hang_s, _STOPPED_S)

    @property
    def idle_s(self) -> float:
        """For one that uses no processor and moves no bytes."""
        return max(min(self.hang_s, _STOPPED_S), self.hang_s / 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """An operation that does not end."""

    operation: Entry
    """The rank that has waited longest, and in what; where nobody waits, the one that does not move."""
    waiting: tuple[int, ...]
    """Ranks that have come to the operation."""
    missing: tuple[int, ...]
    """Ranks that have not; empty where all have come and it still does not end."""


def find_hang(
    entries: Sequence[Entry | None],
    now_ns: int,
    patience: Patience,
    stopped_s: Sequence[float],
    idle_s: Sequence[float],
    free: Collection[int] = (),
    silent: Collection[int] = (),
) -> Hang | None:
    """Find an operation in which a rank waits in vain, or a rank that was stopped.

    `stopped_s` and `idle_s`: for how long each rank was stopped by a signal, or did nothing at all. A stopped rank
    counts as missing wherever it was; one that waits for something else only where nobody is busy. Where everybody
    is in the same operation it may only be slow, so it is given twice the time. Where nobody waits, a rank that was
    stopped is told of, and of those that are `free` of others one that was idle for all of `hang_s`. Of those that are
    `silent` nobody knows what they do now: they are the missing ones, wherever they were.
    """
    waiting = [e for e in entries if _waits(e) and stopped_s[e.rank] == 0 and e.rank not in silent]
    still = _find_still(entries, patience, stopped_s, idle_s, free)
    if not waiting:
        return still
    oldest = min(waiting, key=lambda entry: (entry.since_ns, entry.rank))
    waited_s = (now_ns - oldest.since_ns) / 1e9
    there = {entry.rank for entry in waiting if (entry.step, entry.label) == (oldest.step, oldest.label)}
    gone = {entry.rank for entry in entries if entry is not None and entry.state is State.GONE}
    missing = tuple(rank for rank in range(len(entries)) if rank not in there and rank not in gone)
    busy = tuple(rank for rank in missing if stopped_s[rank] or not _waits(entries[rank]))
    busy = tuple(rank for rank in missing if rank in silent) or busy
    missing = busy or missing  # of a pipeline, others wait for other messages
    if not missing:
        limit_s = 2 * patience.hang_s
    elif any(stopped_s[rank] > 0 for rank in missing):
        limit_s = patience.stopped_s
        missing = tuple(rank for rank in missing if stopped_s[rank] > 0)
        waited_s = min(waited_s, *(stopped_s[rank] for rank in missing))
    elif busy and all(idle_s[rank] > patience.idle_s for rank in missing):
        limit_s = patience.idle_s
    else:
        limit_s = patience.hang_s
    if waited_s <= limit_s:
        return still
    return Hang(operation=oldest, waiting=tuple(sorted(there)), missing=missing)


def _find_still(
    entries: Sequence[Entry | None],
    patience: Patience,
    stopped_s: Sequence[float],
    idle_s: Sequence[float],
    free: Collection[int],
) -> Hang | None:
    """Ranks that do not move, whether or not anybody waits for them."""
    there = [entry for entry in entries if entry is not None and entry.state not in (State.DONE, State.GONE)]
    still = [entry for entry in there if stopped_s[entry.rank] > patience.stopped_s]
    busy = [entry for entry in there if entry.state is not State.WAITING]
    still = still or [entry for entry in busy if entry.rank in free and idle_s[entry.rank] > patience.hang_s]
    if not still:
        return None
    return Hang(operation=still[0], waiting=(), missing=tuple(entry.rank for entry in still))


def _waits(entry: Entry | None) -> TypeGuard[Entry]:
    return entry is not None and entry.state is State.WAITING


def to_error(
    hang: Hang, entries: Sequence[Entry | None], processes: Sequence[Process], hang_s: float
) -> HangError:
    """Ask the missing ranks for their stacks, and put everything into one message."""
    now_ns = time.monotonic_ns()
    operation = hang.operation
    waited = format_seconds((now_ns - operation.since_ns) / 1e9)
    missing = f"{_ranks(hang.missing, 'is', 'are')} missing" if hang.missing else "all ranks are there"
    where = f"step {operation.step + 1}" + (
        f", instruction {operation.index}" if operation.index >= 0 else ""
    )
    if hang.waiting:
        first = (
            f"no progress for {waited}: {_ranks(hang.waiting, 'waits', 'wait')} in '{operation.label}' "
            f"({where}); {missing}."
        )
    else:
        first = f"{_ranks(hang.missing, 'does', 'do')} not move: {operation.place()}, for {waited}."
    lines = [first]
    for rank, entry in enumerate(entries):
        if entry is None:
            lines.append(f"rank {rank}: unknown (its slot on the board is half written)")
        else:
            age = f", for {format_seconds((now_ns - entry.since_ns) / 1e9)}" if entry.since_ns else ""
            where = f" on {processes[rank].host}" if processes[rank].host else ""
            lines.append(f"rank {rank}{where}: {entry.place()}{age}")
    lines += ask_stacks([processes[rank] for rank in hang.missing or hang.waiting])
    return HangError(
        "\n".join(lines),
        waiting=hang.waiting,
        missing=hang.missing,
        fix=f"see what holds the missing ranks; where one operation may take longer, raise the limit of {hang_s:g} s.",
    )


def ask_stacks(processes: Sequence[Process]) -> list[str]:
    """Have each process dump its Python stack, also one that is stuck in C, and return the text by rank."""
    sizes, states = {}, {}
    silent = {process.rank for process in processes if process.is_silent}
    for process in processes:
        sizes[process.rank] = os.fstat(process.stacks).st_size
        if process.poll() is None and process.rank not in silent:
            states[process.rank] = process.ask_stack()
    lines = []
    deadline = time.monotonic() + _ANSWER_S
    for process in processes:
        if process.poll() is not None:
            lines.append(f"rank {process.rank} has ended (exit status {process.exit_code}).")
            continue
        if process.rank in silent:
            lines.append(f"rank {process.rank}: nothing is heard of its host {process.host} any more.")
            continue
        dump = _await_dump(process, sizes[process.rank], deadline)
        state = states[process.rank] if states[process.rank] == "T" else process.pulse()[0]
        meaning = f"process state {state or '?'}: {_PROCESS_STATES.get(state, 'unknown')}"
        if state == "T":
            lines.append(f"rank {process.rank} (process {process.pid}) was found in {meaning}.")
        if dump:
            lines.append(f"stack of rank {process.rank}, innermost call first:\n{dump}")
        else:
            lines.append(
                f"rank {process.rank} (process {process.pid}) did not show its stack within {_ANSWER_S:g} s; {meaning}."
            )
    return lines


def _await_dump(process: Process, start: int, deadline: float) -> str:
    size, asked_s = start, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.05)
        previous, size = size, os.fstat(process.stacks).st_size
        if size > start and size == previous:  # it has stopped growing
            break
        if size == start and time.monotonic() - asked_s > _ASK_EVERY_S and process.poll() is None:
            process.ask_stack()
            asked_s = time.monotonic()
    return trim_stack(os.pread(process.stacks, size - start, start).decode(errors="replace"))


def trim_stack(dump: str) -> str:
    """Cut a dump of faulthandler to the user's side: what lies outside of a worker's main is how it was started."""
    kept: list[str] = []
    for thread in dump.strip().split("\n\n"):
        lines = thread.splitlines()
        if any(_OWN_THREAD.search(line) for line in lines):
            continue
        outer = [number for number, line in enumerate(lines) if _OUTER_FRAME.search(line)]
        kept += lines[: outer[0]] if outer else lines
    return "\n".join(kept[:_STACK_LINES])


def _ranks(ranks: Sequence[int], one: str, many: str) -> str:
    if not ranks:
        return f"no rank {one}"
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {', '.join(map(str, ranks))} {many}"
