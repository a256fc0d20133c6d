"""Starting, watching and ending the workers of one run on this host.

In: a function to run in every rank. Out: what each rank returned; or one exception, when nothing of the run
is left. It never uses a fixed port, never leaves a process behind and never prints.

Why not torch elastic's `start_processes`: its signal handlers raise at once and
are never taken back, so Ctrl-C leaves no time for a checkpoint; it reports the failure that it happens to
poll first, often another rank's lost connection; a stopped rank keeps it for 30 s; it logs tracebacks by
itself; its spawn runs the user's `__main__` again and cannot take a lambda; its workers outlive a parent that
was killed. What is left of it is `multiprocessing`, used directly here.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from plait.errors import LostError, RunError, UsageError
from plait.files.write import write_last_words
from plait.run.setup.interfaces import choose_interfaces, register_buffers
from plait.run.start.board import Board
from plait.run.start.child import Main, Seat
from plait.run.start.guardian import Guardian
from plait.run.start.processes import (
    Crew,
    Start,
    choose_start,
    close_crew,
    end_crew,
    require_files,
    start_crew,
)
from plait.run.start.tasks.first import First
from plait.run.start.watch.interrupts import Interrupts
from plait.run.start.watch.limits import Interrupted, WatchLimits
from plait.run.start.watch.monitor import Monitor
from plait.run.wire import group
from plait.run.wire.store import RunStore
from plait.run.wire.switchboard import Switchboard

__all__ = [
    "Interrupted",
    "Losses",
    "Main",
    "OtherTasks",
    "Seat",
    "connect",
    "connect_by",
    "disconnect",
    "launch",
]

GroupKind = Literal["plait", "nccl"]
"""Sockets of the run's own, or the library for GPUs."""
_GRACE_S = 30.0
"""For workers to save and return after the first Ctrl-C: Slurm (KillWait) and Kubernetes kill a
task after as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Ranks that a run can do without, and what becomes of it."""

    dispensable: Collection[int] = ()
    """Ranks whose death the others go on after, in the same processes."""
    outlives: bool = False
    """Whether a loss of others is a `LostError`, so that the run can go on with those that are left."""
    holds_all: bool = False
    """Whether each rank holds all of the model: one that is left writes it down first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTasks:
    """Tasks of an engine that share the ranks of a run."""

    party: First
    told: Mapping[str, Any] = field(default_factory=dict)
    """What they are told about this round."""
    resume: Path | None = None
    """The checkpoint that they are given."""


def launch(
    main: Main,
    *,
    ranks: int,
    threads_per_rank: int = 1,
    hang_s: float = 300.0,
    start: Start = "auto",
    on_event: Callable[[int, dict[str, Any]], bool | None] | None = None,
    run_dir: Path | None = None,
    losses: Losses = Losses(),
    guardian: Guardian | None = None,
    tasks: OtherTasks | None = None,
) -> list[Any]:
    """Run `main(seat)` in `ranks` processes and return what each returned, by rank.

    Results and events are JSON-able. `on_event(rank, event)` is called here, in this thread; True asks all
    ranks to stop. When a dispensable rank dies that has come to a step (`seat.board.enter`: before, others may wait
    for it to connect) while another of them lives, the run goes on: `on_event` is told what was `lost`, the others
    find it by `seat.board.is_gone`, and its result is None. A plait error
    that a worker raised is raised here as it was; any other failure as `WorkerError`, ranks that wait in vain
    as `HangError`. The first Ctrl-C or SIGTERM sets `seat.stop_requested()` and gives the workers 30 s
    to save and return, a second Ctrl-C ends them; both raise `Interrupted`, a KeyboardInterrupt with the results.
    With other `tasks`, files of ranks that they have come to `run_dir`. Whatever happens, no worker is left at return;
    in `run_dir`, where given, `failure.txt` and `failed-rank-*.txt` keep what was told and also the echoes on other
    ranks.
    """
    if ranks < 1 or threads_per_rank < 1:
        raise UsageError(f"ranks={ranks} and threads_per_rank={threads_per_rank} must both be at least 1.")
    how = choose_start(start, threads_per_rank)
    crew = Crew(processes=[], board=Board.create(ranks), ranks=ranks)
    with ExitStack() as stack:
        guardian = guardian if guardian is not None else stack.enter_context(Guardian())
        stack.callback(close_crew, crew)
        interrupts = stack.enter_context(Interrupts())
        after = stack.enter_context(ExitStack())
        local, remote, secret = range(ranks), [], None
        if tasks is not None:
            local = tasks.party.members.seats(ranks)[0]
            tasks.party.on_interrupt = interrupts.note_once
            secret = tasks.party.secret(local)
            after.callback(os.close, secret)
            remote = stack.enter_context(tasks.party.round(crew.board, run_dir, tasks.told, tasks.resume))
        stack.callback(end_crew, crew)
        require_files(len(local))
        try:
            lines = start_crew(
                crew, main, how, threads=threads_per_rank, guardian=guardian, local=local, secret=secret
            )
        except OSError as error:
            begun = f"rank {len(crew.processes)} of {ranks} cannot be started: {error.strerror}."
            raise RunError(
                begun, fix="allow more processes (ulimit -u) and memory, or use fewer ranks."
            ) from error
        crew.processes.extend(remote)
        switchboard = Switchboard(lines)
        after.callback(switchboard.close)  # after the workers, who would otherwise complain of its loss
        switchboard.start()  # its thread, after the forks; until then a request waits in its socket
        if tasks is not None:
            tasks.party.connect(switchboard)
        limits = WatchLimits(hang_s=hang_s, grace_s=_GRACE_S)
        tell = on_event or (lambda rank, event: None)
        monitor = Monitor(crew, limits, interrupts, tell, losses.dispensable, switchboard.check)
        try:
            return monitor.run()
        except RunError as error:
            _raise_lost(error, monitor, interrupts, losses, ranks)
            _keep(error, monitor, run_dir)
            raise
    raise AssertionError("an exit callback swallowed an exception")


def _raise_lost(
    error: RunError, monitor: Monitor, interrupts: Interrupts, losses: Losses, ranks: int
) -> None:
    """Where the run outlives what has failed: say which ranks are lost for good; nothing otherwise."""
    lost = monitor.lost_for_good(error) if losses.outlives else ()
    if not 0 < len(lost) < ranks:
        return
    seen_s = time.monotonic()
    handed = monitor.hand_over(lost) if losses.holds_all else None
    if interrupts.count:  # whoever has started this ends it, and may start it again
        raise Interrupted(number=interrupts.number, results=[], returned=False) from error
    raise LostError(error, lost=lost, seen_s=seen_s, handed=handed) from error


def _keep(error: RunError, monitor: Monitor, run_dir: Path | None) -> None:
    if run_dir is None:
        return
    write_last_words(run_dir / "failure.txt", f"{error}\n")
    for rank, failure in monitor.failures.items():
        if failure.told is not None:
            write_last_words(run_dir / f"failed-rank-{rank}.txt", f"{failure.told['traceback']}\n")


def connect(seat: Seat, backend: GroupKind = "plait", *, timeout_s: float) -> None:
    """Join the process group of this run, through what this process inherited: nothing listens on the host.

    `timeout_s` should exceed the launch's `hang_s`: then a hang is reported by the parent, who knows more of
    it.
    """
    connect_by(seat.store, seat.ranks, backend, timeout_s=timeout_s)


def connect_by(store: RunStore, ranks: int, backend: GroupKind, *, timeout_s: float) -> None:
    """The same, with the store alone."""
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    store.connections += 1
    group.register()
    if backend == "nccl":
        register_buffers()
        if store.reach is None:
            choose_interfaces(store.rank if ranks > torch.cuda.device_count() else None)
    dist.init_process_group(
        backend,
        store=PrefixStore(f"group {store.connections}", store),
        rank=store.rank,
        world_size=ranks,
        timeout=timeout,
    )


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if not dist.is_initialized():
        return
    everybody = dist.group.WORLD
    dist.destroy_process_group()
    if isinstance(everybody, group.PlaitGroup):
        everybody.peers.close()
