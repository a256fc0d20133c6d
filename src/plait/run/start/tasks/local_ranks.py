"""The ranks of a task that is not the first, for one round: started, told of, ended.

In: a connection to task 0. Out: nothing; what ranks write, how they end and whether they move goes to task 0, and
what it says goes to them. It judges nothing, and ends with the last of its ranks. Where task 0 is lost, and a rank here
holds all that is trained, that is written down first.
"""

import math
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from plait.errors import RunError
from plait.run.start.board import Board
from plait.run.start.child import Main
from plait.run.start.guardian import Guardian
from plait.run.start.memory_file import anonymous_file
from plait.run.start.process import Process
from plait.run.start.processes import Crew, Start, choose_start, close_crew, end_crew, start_crew
from plait.run.start.tasks.trunk import Arrivals, Message, Mirror, Trunk
from plait.run.start.watch.interrupts import Interrupts
from plait.run.start.watch.limits import WatchLimits
from plait.run.start.watch.monitor import Monitor
from plait.run.wire.reach import Secret

_LOOK_S = 0.05
"""Between two looks at ranks that have nothing to say."""
_PULSE_S = 0.5
"""Between two looks at whether ranks move."""
_FILES_S = 1.0
"""Between two looks for checkpoints to send."""
_READ_BYTES = 1 << 20
"""Read at once from a rank."""
_LATEST_BYTES = 1 << 16
"""Of what a rank wrote that are kept."""

HandOn = Callable[[Callable[[int], str | None]], None]
"""Is given what has a rank write down what it holds, of a step beyond one that is saved, and returns the checkpoint."""


class LocalRanks:
    """The ranks of this host in one round."""

    def __init__(
        self,
        trunk: Trunk,
        waiting: list[Message],
        lost: Callable[[OSError], RunError],
        number: int,
        folder: Path,
        is_shared: bool,
        hand_on: HandOn | None,
        copies: Arrivals | None,
    ) -> None:
        """`waiting`: messages that were read before this round took over, and afterwards those that it leaves;
        `hand_on`: what is done with what ranks here hold, where task 0 is lost; `copies`: where this host keeps what
        task 0 has saved, which has it on its own disk alone."""
        self._trunk, self._waiting, self._lost, self._number = trunk, waiting, lost, number
        self._folder, self._is_shared, self._hand_on = folder, is_shared, hand_on
        self._copies = copies
        self._latest: dict[int, bytes] = {}
        """What ranks wrote last: task 0 may not have heard it."""
        self._over = False
        self._slots: dict[int, bytes] = {}
        self._stacks: dict[int, int] = {}
        self._ended: set[int] = set()
        self._mirror = Mirror(trunk, folder)
        self._interrupts = 0
        self._pulse_at = self._files_at = 0.0

    def run(
        self,
        main: Main,
        local: range,
        ranks: int,
        threads: int,
        start: Start,
        guardian: Guardian,
        call: Callable[[int], socket.socket],
        secret: Secret,
    ) -> None:
        """Start them and stay until all have ended, and task 0 has all that they left."""
        crew = Crew(processes=[], board=Board.create(ranks), ranks=ranks)
        file = anonymous_file("plait-secret")
        os.write(file, secret.write())
        try:
            with ExitStack() as stack:
                stack.callback(close_crew, crew)
                stack.callback(os.close, file)
                interrupts = stack.enter_context(Interrupts())
                stack.callback(end_crew, crew)
                start_crew(
                    crew,
                    main,
                    choose_start(start, threads),
                    threads=threads,
                    guardian=guardian,
                    local=local,
                    secret=file,
                    call=call,
                )
                try:
                    self._attend(crew, interrupts)
                except OSError:
                    if self._hand_on is not None:
                        self._hand_on(partial(self._write_held, crew, interrupts))
                    raise
            self._send_files(final=True)
        except OSError as error:
            raise self._lost(error) from error

    def _attend(self, crew: Crew, interrupts: Interrupts) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._trunk.socket, selectors.EVENT_READ, None)
        for process in crew.processes:
            selector.register(process.pipe, selectors.EVENT_READ, process)
        with selector:
            self._obey(crew)
            while len(self._ended) < len(crew.processes) or not self._over:
                for key, _ in selector.select(_LOOK_S):
                    if key.data is None:
                        self._waiting += self._trunk.read()
                        self._obey(crew)
                    elif not self._pass_lines(key.data):
                        selector.unregister(key.data.pipe)
                self._report(crew)
                if interrupts.count > self._interrupts:
                    self._interrupts = interrupts.count
                    self._trunk.send({"op": "interrupt", "number": interrupts.number})

    def _write_held(self, crew: Crew, interrupts: Interrupts, beyond: int) -> str | None:
        """Have a rank here write down what it holds, of a step beyond that one; the checkpoint."""
        monitor = Monitor(
            crew, WatchLimits(hang_s=math.inf, grace_s=0.0), interrupts, lambda rank, event: None
        )
        for rank, latest in self._latest.items():
            monitor.feed(rank, latest)
        return monitor.hand_over((), beyond)

    def _obey(self, crew: Crew) -> None:
        """Do what task 0 says, up to the word that the round is over."""
        by_rank = {process.rank: process for process in crew.processes}
        while self._waiting and not self._over:
            head, body = self._waiting.pop(0)
            match head["op"]:
                case "file" | "folder" | "place" | "drop":
                    self._keep(head, body)
                case "signal":
                    by_rank[head["rank"]].signal(head["number"])
                case "stack":
                    process = by_rank[head["rank"]]
                    if process.poll() is None:
                        process.ask_stack()
                case "stop":
                    crew.board.is_alone = False
                    crew.board.request_stop()
                case "last":
                    crew.board.hear_last(head["step"])
                    self._trunk.send({"op": "heard"})
                case "lost":
                    by_rank[head["rank"]].tell_lost()
                case "giver":
                    crew.board.giver = head["rank"]
                case "gone":
                    crew.board.mark_gone(head["rank"])
                case "over":
                    self._over = True
                    if any(process.poll() is None for process in crew.processes):
                        end_crew(crew)

    def _keep(self, head: dict[str, Any], body: bytes) -> None:
        """A piece of a copy; where there is no room for them, none is kept: an old one would be taken for the last."""
        if self._copies is not None:
            try:
                self._copies.take(head, body)
            except OSError:
                self._copies.discard()
                self._copies = None

    def _pass_lines(self, process: Process) -> bool:
        """Pass on what a rank wrote; whether more may come."""
        while True:
            try:
                piece = os.read(process.pipe, _READ_BYTES)
            except BlockingIOError:
                return True
            if not piece:
                return False
            kept = self._latest.get(process.rank, b"") + piece
            self._latest[process.rank] = (
                kept if len(kept) <= _LATEST_BYTES else kept[-_LATEST_BYTES:].partition(b"\n")[2]
            )
            self._say("lines", process.rank, piece)

    def _report(self, crew: Crew) -> None:
        now = time.monotonic()
        looks = now - self._pulse_at > _PULSE_S
        for process in crew.processes:
            rank = process.rank
            slot = crew.board.slot(rank)
            if slot != self._slots.get(rank) and looks:
                self._slots[rank] = slot
                self._say("slot", rank, slot)
            if rank in self._ended:
                continue
            self._pass_stack(process)
            if looks:
                state, processor_s, num_bytes = process.pulse()
                told = {
                    "state": state,
                    "processor_s": processor_s,
                    "num_bytes": num_bytes,
                    "pid": process.pid,
                }
                self._say("pulse", rank, b"", **told)
            if process.poll() is not None:
                self._pass_lines(process)
                self._pass_stack(process)
                self._say("slot", rank, crew.board.slot(rank))
                self._say("ended", rank, b"", code=process.exit_code)
                self._ended.add(rank)
        if looks:
            self._pulse_at = now
        if now - self._files_at > _FILES_S:
            self._files_at = now
            self._send_files(final=False)

    def _pass_stack(self, process: Process) -> None:
        known, size = self._stacks.get(process.rank, 0), os.fstat(process.stacks).st_size
        if size > known:
            self._stacks[process.rank] = size
            self._say("stack", process.rank, os.pread(process.stacks, size - known, known))

    def _say(self, op: str, rank: int, body: bytes, **more: Any) -> None:
        self._trunk.send({"op": op, "round": self._number, "rank": rank, **more}, body)

    def _send_files(self, *, final: bool) -> None:
        """What ranks have written here goes to the run folder: checkpoints when they are whole, the rest at the end."""
        if self._is_shared:
            return
        root = self._folder
        self._mirror.look()
        for path in sorted(root.rglob("*")) if final else ():
            if path.is_file() and path.relative_to(root).parts[0] != "checkpoints":
                self._trunk.send_tree(root, path)
