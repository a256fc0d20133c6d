"""Task 0 of an engine: it waits for the others, sees that all do the same, and watches their ranks as its own.

In: a place, a token. Out: a `First`, through which `launch` starts rounds of ranks on all hosts; it stays connected
until the process ends. What contradicts itself is told here, in one line, and the others end without a word.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from plait.errors import LostError, RunError, UsageError
from plait.run.join.addresses import addresses_of_first, own_address
from plait.run.join.place import Place
from plait.run.join.token import ports_of
from plait.run.start.board import Board
from plait.run.start.child import describe
from plait.run.start.memory_file import anonymous_file
from plait.run.start.tasks.agreement import compare, name_tasks
from plait.run.start.tasks.counsel import Counsel
from plait.run.start.tasks.doors import Doors
from plait.run.start.tasks.members import Members, Other
from plait.run.start.tasks.open_round import Lines, OpenRound, keep_copies, tell_board
from plait.run.start.tasks.remote import RemoteProcess
from plait.run.start.tasks.trunk import Arrivals, Trunk
from plait.run.wire.door import Address
from plait.run.wire.frames import pack
from plait.run.wire.reach import Reach, Secret
from plait.run.wire.store import RunStore
from plait.run.wire.switchboard import Switchboard
from plait.threads import start_thread

_FILES_S = 600.0
"""For another host to send what its ranks have written, while it moves."""
_TELLS_S = 5.0
"""For tasks that have not come to hear why none of them begins."""
_LAST_FILES_S = 5.0
"""The same after a failure: everybody is gone within 10 s."""


class First:
    """The first task, and the way to the others."""

    def __init__(self, place: Place, token: bytes, environment: Mapping[str, str], patience_s: float) -> None:
        self.place = place
        self.members = Members(place=place)
        self.others = self.members.others
        self.counsel = Counsel(members=self.members, late=self._late)
        """What all know of a run folder, before they begin."""
        self._facts: Mapping[str, Any] | None = None
        """What all have agreed to do, while they do it."""
        self.owes_end = False
        """Whether the others wait for a word that what was begun is over."""
        self.found: dict[str, dict[str, str] | None] = {}
        """Run folders that all tasks have looked for, and what they say of how the run was started."""
        self.told: BaseException | None = None
        """The error of which they were told last."""
        self.on_interrupt: Callable[[int], None] = lambda number: None
        """Is told when another task is asked to stop."""
        self._token = token
        self._has_met = False
        """Whether all have come once."""
        self._refusal: Mapping[str, Any] | None = None
        """Why this task has given up before."""
        self._round: OpenRound | None = None
        self._seats = Lines()
        """Those of tasks which are ranks themselves."""
        self._count = 0
        chosen = own_address(environment)
        hosts = (chosen,) if chosen is not None else addresses_of_first(place)
        self._doors = Doors(hosts, ports_of(token), token, self._receive)
        expected = range(1, place.tasks - place.absent)
        try:
            self.members.wait(
                lambda: len(self.members.present()) == len(expected),
                patience_s,
                lambda: self._late(
                    f"{name_tasks(set(expected) - set(self.others))} of {place.tasks} did not come within "
                    f"{patience_s:g} s{self._strangers()}"
                ),
            )
        except BaseException as error:
            self._give_up(error, len(expected))
            raise
        with self.members.changed:
            self._has_met = True
            self._doors.keep(self.members.came_by())
            for other in self.members.present():
                self._place(other)

    def _give_up(self, error: BaseException, tasks: int) -> None:
        """Tell the others why, those too that come within seconds; then nobody may find this task any more."""
        with self.members.changed:
            self._refusal = describe(error)
            for other in self.others.values():
                self._refuse(other)
            if any(other.error is not None for other in self.others.values()):  # not where time is up
                self.members.changed.wait_for(lambda: len(self.others) == tasks, _TELLS_S)
        self.close()

    def _refuse(self, other: Other) -> None:
        with suppress(OSError):
            other.trunk.send({"op": "end", "summary": None, "error": self._refusal})

    @property
    def address(self) -> Address:
        """Where this task is reached."""
        return self._doors.address

    def _place(self, other: Other) -> None:
        """Tell a task on this host, which may have come by any of its addresses, by which one other hosts reach it."""
        with suppress(OSError):
            other.trunk.send({"op": "met", "address": self.address if other.is_beside else None})

    def _strangers(self) -> str:
        count = self._doors.turned_away
        return f" ({count} connections knew no token)" if count else ""

    def _late(self, what: str) -> UsageError:
        return UsageError(
            f"{what}.",
            fix="start all of them with the same token (docs/hosts.md), on hosts that reach "
            f"{self._doors.hosts}; PLAIT_JOIN_S gives them more time.",
        )

    def begin(self, facts: Mapping[str, Any], patience_s: float) -> None:
        """All tasks are about to do the same; or the error that says what differs."""
        self.members.wait(
            lambda: all(o.facts is not None or o.said is not None for o in self.members.present()),
            patience_s,
            lambda: self._late(
                f"{name_tasks(o.task for o in self.members.present() if o.facts is None)} did not come so far within "
                f"{patience_s:g} s"
            ),
        )
        for other in self.members.present():
            if other.said is not None:
                raise UsageError(
                    f"task {other.task} on {other.host} looks for the run in {other.said['folder']} to go on with it; "
                    "task 0 begins one.",
                    fix="start the same command on all hosts.",
                )
            compare(facts, other)
            other.facts = None
        with self.members.changed:
            self._facts = facts
            early = [o for o in self.others.values() if o.is_returning and o.facts is not None]
            asking = [o for o in self.others.values() if o.is_returning and o.said is not None]
        self.members.tell({"op": "agreed"})
        for other in early:
            self._welcome(other)
        for other in asking:
            self.counsel.repeat(other)

    def release(self) -> None:
        """All have agreed, and from here on go by themselves: no word is owed to them."""
        with self.members.changed:
            self.owes_end, self._facts = False, None

    def _welcome(self, other: Other) -> None:
        """A task that comes while the run is under way is to do the same as all; it waits until it is taken in."""
        assert self._facts is not None
        try:
            compare(self._facts, other)
        except UsageError as error:
            other.trunk.send({"op": "end", "summary": None, "error": describe(error)})
        else:
            other.is_returning, other.facts = True, None
            other.trunk.send({"op": "agreed"})

    @property
    def has_returned(self) -> bool:
        """Whether tasks that were lost are there again, and ready."""
        return any(o.is_returning and o.is_ready and o.lost is None for o in self.others.values())

    def end(self, summary: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """What all have begun is over."""
        if not self.owes_end:
            return
        self.owes_end, self._facts, self.told = False, None, error
        told = {"op": "end", "summary": summary, "error": None if error is None else describe(error)}
        for other in self.others.values():
            with suppress(OSError):
                other.trunk.send(told)

    def hosts(self) -> list[dict[str, Any]]:
        """All tasks, for the run's records: where each is, and by how much its times in a trace may be off."""
        return self.members.hosts(self.address[0])

    def close(self) -> None:
        """Hang up."""
        self._doors.close()
        for other in self.others.values():
            other.trunk.close()

    def secret(self, local: range) -> int:
        """A file with what a local rank needs to reach those of other hosts."""
        secret = Secret(token=self._token, host=self.address[0], beside=(local.start, local.stop))
        file = anonymous_file("plait-secret")
        os.write(file, secret.write())
        return file

    def own_store(self, timeout_s: float) -> RunStore:
        """The store of a run whose ranks are the tasks themselves, this one rank 0; for as long as the process
        lives."""
        near, far = socket.socketpair()
        secret = Secret(token=self._token, host=self.address[0], beside=(0, 0))
        switchboard = Switchboard([near])
        switchboard.start()
        with self.members.changed:
            self._seats.connect(switchboard)
        return RunStore(far.detach(), 0, timeout_s, reach=Reach(0, secret, timeout_s))

    @contextmanager
    def round(
        self, board: Board, folder: Path | None, info: Mapping[str, Any], resume: Path | None
    ) -> Iterator[list[RemoteProcess]]:
        """Have the others start their ranks; they are told of this board, and end with the block."""
        members, seats = self.members.present(), self.members.seats(board.ranks)
        for other in members:
            if other.lost is not None:
                raise RunError(f"task {other.task} on {other.host} is gone: {other.lost}.")
            other.is_done = other.has_heard = False
        self._count += 1
        board.is_alone = False
        processes = {
            rank: RemoteProcess(rank=rank, trunk=other.trunk, host=other.host, clock_ns=other.clock_ns)
            for other in members
            for rank in seats[other.task]
        }
        arrivals = {o.task: Arrivals(folder, o.task) for o in members} if folder is not None else {}
        self.members.wait(lambda: all(other.is_ready for other in members), math.inf, lambda: self._late(""))
        for other in members:
            other.is_apart = False
        self._round = OpenRound(number=self._count, processes=processes, board=board, arrivals=arrivals)
        marker = folder / f".shared-{token_hex(8)}" if folder is not None else None
        over = threading.Event()
        pump = threading.Thread(
            target=tell_board, args=(board, self.members, over), name="plait hosts", daemon=True
        )
        copies = threading.Thread(
            target=keep_copies, args=(folder, self.members, over), name="plait copies", daemon=True
        )
        is_right = answers = False
        try:
            if marker is not None:
                marker.touch()
            names = {"folder": str(folder.absolute()) if folder else None, "marker": marker and marker.name}
            for other in members:
                own = seats[other.task]
                if resume is not None:
                    other.trunk.send_tree(resume.parent, resume)
                other.trunk.send(
                    {"op": "round", "number": self._count, "first": own.start, "count": len(own)}
                    | {"ranks": board.ranks, "resume": resume and str(resume.absolute()), **names, **info}
                )
            start_thread(pump)
            if folder is not None and info.get("outlives"):
                start_thread(copies)
            try:
                yield list(processes.values())
                is_right = answers = True
            except (KeyboardInterrupt, LostError) as error:
                is_right = True  # they have saved, and their files count
                answers = getattr(error, "returned", False)
                raise
        finally:
            over.set()
            self.members.tell({"op": "over"})
            self.members.await_end(_FILES_S if is_right else _LAST_FILES_S, of_silent=answers)
            self._round = None
            for arrival in arrivals.values():
                arrival.close()
            if marker is not None:
                marker.unlink(missing_ok=True)
            for thread in (pump, copies):
                if thread.is_alive():
                    thread.join()

    def connect(self, switchboard: Switchboard) -> None:
        """Lines of other hosts' ranks go to this switchboard."""
        found = self._round
        assert found is not None
        with self.members.changed:
            found.lines.connect(switchboard)

    def _receive(self, hello: dict[str, Any], made: socket.socket) -> dict[str, Any] | None:
        if hello.get("op") == "line":
            return self._take_line(hello, made)
        if hello.get("op") == "seat":
            made.sendall(pack({}))
            with self.members.changed:
                self._seats.add(int(hello["rank"]), made)
            return None
        task, host = hello.get("task"), str(hello.get("host"))[:200]
        if hello.get("op") == "join" and hello.get("tasks") != self.place.tasks:
            with self.members.changed:
                return self.members.refuse(task, hello.get("tasks"), host)
        if hello.get("op") != "join" or not isinstance(task, int) or not 0 < task < self.place.tasks:
            made.close()
            return None
        with self.members.changed:
            known = self.others.get(task)
            if known is not None and (known.lost is None or self._facts is None):
                return {"refused": f"task {task} is here already."}
            made.sendall(pack({}))
            other = Other(task=task, trunk=Trunk(made), host=host, clock_ns=0, clock_error_ns=0)
            name = f"plait task {task}"
            start_thread(threading.Thread(target=self._listen, args=(other,), name=name, daemon=True))
            return None

    def _take_line(self, hello: dict[str, Any], made: socket.socket) -> dict[str, Any] | None:
        with self.members.changed:
            found = self._round
            if (
                found is None
                or hello.get("round") != found.number
                or hello.get("rank") not in found.processes
            ):
                return {"refused": "this round is over."}
            made.sendall(pack({}))
            found.lines.add(int(hello["rank"]), made)
        return None

    def _listen(self, other: Other) -> None:
        """Hear what another task has to say, to its end."""
        try:
            for head, body in other.trunk.messages():
                self._take(other, head, body)
        except (OSError, RunError, KeyError, TypeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            with self.members.changed:
                other.lost = f"its host does not answer any more ({reason})"
                if self._round is not None:
                    self._round.lose(other)
                self.members.changed.notify_all()

    def _take(self, other: Other, head: dict[str, Any], body: bytes) -> None:
        op, found = head["op"], self._round
        if op == "clock":
            other.trunk.send({"op": "clock", "sent": head["sent"], "now": time.monotonic_ns()})
        elif op in ("file", "place", "drop"):
            if found is not None and other.task in found.arrivals:
                found.arrivals[other.task].take(head, body)
            else:
                self.counsel.take_file(other, head, body)
        elif op in ("lines", "pulse", "stack", "slot", "ended"):
            if found is not None and head["round"] == found.number:
                found.take(head, body)
        else:
            with self.members.changed:
                if op == "here":
                    other.clock_ns, other.clock_error_ns = int(head["clock_ns"]), int(head["error_ns"])
                    other.is_returning = other.task >= self.place.tasks - self.place.absent
                    self.others[other.task] = other
                    if self._has_met:
                        self._place(other)
                    elif self._refusal is not None:
                        self._refuse(other)
                elif op == "begin":
                    other.facts = dict(head["facts"])
                    if self._facts is not None:
                        self._welcome(other)
                elif op == "said":
                    other.said = dict(head["said"])
                    if self._facts is not None:
                        self.counsel.repeat(other)
                elif op == "brought":
                    other.has_brought = True
                elif op == "apart":
                    other.is_apart = True
                elif op == "failed":
                    other.error = dict(head["error"])
                elif op == "ready":
                    other.is_ready = True
                elif op == "heard":
                    other.has_heard = True
                elif op == "done":
                    other.is_done, other.is_ready = True, False
                elif op == "interrupt":
                    self.on_interrupt(int(head["number"]))
                else:
                    raise ValueError(op)
                self.members.changed.notify_all()
