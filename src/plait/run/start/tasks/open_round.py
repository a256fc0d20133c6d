"""One start of all ranks, as the first task sees those of the others.

In: what other tasks tell of their ranks. Out: their processes, their slots on the board, their lines to the
switchboard; and the others are told what the board says to all.
"""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.run.start.board import Board
from plait.run.start.tasks.members import Members, Other
from plait.run.start.tasks.remote import RemoteProcess
from plait.run.start.tasks.trunk import Arrivals, Mirror
from plait.run.wire.switchboard import Switchboard

_LOOK_S = 0.02
"""Between two looks at what other hosts must be told."""
_COPY_S = 0.2
"""Between two looks for checkpoints of which another host is to have a copy."""
_COPIED = ("environment.json", "plan.yaml")
"""How a run was started: by this, hosts that do not see its folder know it."""


@dataclass(slots=True)
class Lines:
    """Lines of ranks to a switchboard, which may come before it."""

    _switchboard: Switchboard | None = None
    _early: list[tuple[int, socket.socket]] = field(default_factory=list)

    def connect(self, switchboard: Switchboard) -> None:
        """Lines go here from now on."""
        self._switchboard = switchboard
        for rank, line in self._early:
            switchboard.add(rank, line)

    def add(self, rank: int, line: socket.socket) -> None:
        """A line that came."""
        if self._switchboard is None:
            self._early.append((rank, line))
        else:
            self._switchboard.add(rank, line)


@dataclass(kw_only=True, slots=True)
class OpenRound:
    """One start of all ranks, while it lasts."""

    number: int
    processes: dict[int, RemoteProcess]
    board: Board
    arrivals: dict[int, Arrivals]
    lines: Lines = field(default_factory=Lines)

    def take(self, head: dict[str, Any], body: bytes) -> None:
        """What a rank's task tells of it."""
        process = self.processes[int(head["rank"])]
        op = head["op"]
        if op == "lines":
            process.take_lines(body)
        elif op == "slot":
            self.board.put_slot(process.rank, body, process.clock_ns)
        elif op == "pulse":
            process.take_pulse(str(head["state"]), float(head["processor_s"]), int(head["num_bytes"]))
            process.pid = int(head["pid"])
        elif op == "stack":
            process.take_stack(body)
        else:
            process.end(int(head["code"]))

    def lose(self, other: Other) -> None:
        """A task is gone, and its ranks with it."""
        for process in self.processes.values():
            if process.trunk is other.trunk:
                process.end(-9, other.lost)


def tell_board(board: Board, members: Members, over: threading.Event) -> None:
    """Tell the others what the board says to all ranks, until the round is over."""
    told_stop, told_last, gone = False, False, set[int]()
    while not over.wait(_LOOK_S):
        if board.is_stopping and not told_stop:
            told_stop = True
            members.tell({"op": "stop"})
        last = board.last_step
        if last is not None and not told_last:
            told_last = True
            members.tell({"op": "last", "step": last})
        if told_last and all(o.has_heard or o.lost is not None for o in members.present()):
            board.let_go()
        for rank in board.gone() - gone:
            gone.add(rank)
            members.tell({"op": "gone", "rank": rank})


def keep_copies(folder: Path, members: Members, over: threading.Event) -> None:
    """Have tasks that do not see the run folder know the run, and one of them its checkpoints, until the round is over:
    where the first host is lost with its disk, the run goes on from there."""
    told: set[int] = set()
    keeper: tuple[int, Mirror] | None = None
    while not over.wait(_COPY_S):
        for other in members.present():
            if not other.is_apart or other.lost is not None:
                continue
            with suppress(OSError):  # of one that is lost; whoever listens to it finds out
                if other.task not in told:
                    told.add(other.task)
                    for path in (folder / name for name in _COPIED):
                        other.trunk.send_tree(folder, path)
                if keeper is None:
                    keeper = (other.task, Mirror(other.trunk, folder, over))
                    other.trunk.send({"op": "folder", "path": "checkpoints"})
                if keeper[0] == other.task:
                    keeper[1].look()
