"""Any task of an engine but the first: it starts its ranks when task 0 says so, and tells it all about them.

In: a place, a token. Out: a `Follower`; `follow` runs rounds of ranks until task 0 says that what was begun is over. It
judges nothing by itself: a rank that dies, hangs or raises is task 0's to tell. Where task 0 is gone, its ranks are
ended.
"""

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import EchoError, RunError, UsageError
from plait.files.scratch import scratch_folder
from plait.files.unused import COPY_NAME
from plait.run.join.addresses import addresses_of_first, own_address
from plait.run.join.find import ask_again
from plait.run.join.place import Place
from plait.run.join.token import ports_of
from plait.run.start.child import Main, describe
from plait.run.start.guardian import Guardian
from plait.run.start.processes import Start
from plait.run.start.tasks.local_ranks import LocalRanks
from plait.run.start.tasks.members import DIFFERS_S
from plait.run.start.tasks.trunk import Arrivals, Trunk
from plait.run.start.watch.failure import revive
from plait.run.wire.door import Address, StrangerError, UnreachedError, dial
from plait.run.wire.reach import Reach, Secret
from plait.run.wire.store import RunStore

_CLOCK_READINGS = 16
"""Of which the fastest there and back is taken."""
_LINE_S = 30.0
"""For task 0 to answer once it was reached."""
_TELLS_S = 5.0
"""For task 0 to say what is wrong and end, when it has told the others that it will."""
_CALL_S = 0.2
"""Between two rounds of calls for task 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What task 0 says of one start of ranks."""

    info: Mapping[str, Any]
    """What it says to whoever makes the ranks' task."""
    local: range
    """The ranks that this task has."""
    folder: Path
    """Where ranks here write: the run folder where it can be reached, else one that is sent."""
    resume: Path | None
    """A checkpoint to go on from, on this host."""
    clock_ns: int
    """What the clock here lacks."""


class Follower:
    """A task that is not the first, connected to it."""

    def __init__(self, place: Place, token: bytes, environment: Mapping[str, str], patience_s: float) -> None:
        self.place = place
        self.token = token
        self._sends = environment.get("PLAIT_SEND_FILES", "") not in ("", "0")
        """Whether files are sent to task 0 though its folder can be seen here."""
        self.found: dict[str, dict[str, str] | None] = {}
        """Run folders that all tasks have looked for, and what task 0 says of how the run was started."""
        self.outlives = False
        """Whether the run goes on where tasks are lost."""
        self.has_begun = False
        """Whether task 0 knows what this one is about to do, and watches it."""
        self._waiting: list[tuple[dict[str, Any], bytes]] = []
        host = socket.gethostname()
        hello = {"op": "join", "task": place.task, "tasks": place.tasks, "host": host}
        wrong: UsageError | None = None
        chosen: str | None = None
        try:
            chosen = own_address(environment)
        except UsageError as error:
            wrong = error  # task 0 tells it, for all
        self.first, made = _call_first(place, token, hello, chosen, patience_s)
        self.trunk = Trunk(made)
        self._chosen = chosen
        self._address: str | None = None
        """By which ranks here are reached; None: it is not known before all tasks have come."""
        try:
            self._clock_ns = self._read_clock()
            if wrong is not None:
                self.fail(wrong)
        except BaseException:
            self.trunk.close()
            raise

    def _read_clock(self) -> int:
        """Add this to the clock here for that of task 0; told to task 0 with the most by which it can be wrong."""
        best: tuple[int, int] | None = None
        for _ in range(_CLOCK_READINGS):
            sent = time.monotonic_ns()
            self.trunk.send({"op": "clock", "sent": sent})
            head, _ = self._next()
            now = time.monotonic_ns()
            reading = (now - sent, int(head["now"]) - (sent + now) // 2)
            best = reading if best is None else min(best, reading)
        assert best is not None
        there_and_back, clock_ns = best
        self.trunk.send({"op": "here", "clock_ns": clock_ns, "error_ns": there_and_back // 2})
        return clock_ns

    def _next(self) -> tuple[dict[str, Any], bytes]:
        """The next message that is not taken at once."""
        while not self._waiting:
            self._hear()
        return self._waiting.pop(0)

    def _hear(self) -> None:
        """Take what comes next."""
        try:
            found = self.trunk.read()
        except OSError as error:
            raise self.lost(error) from error
        for head, body in found:
            if head["op"] == "met":
                if head["address"] is not None:  # this is the host of task 0, too
                    self.first = str(head["address"][0]), int(head["address"][1])
                where = self.first if head["address"] is not None else self.trunk.socket.getsockname()
                self._address = self._chosen or str(where[0])
            else:
                self._waiting.append((head, body))

    def _secret(self) -> Secret:
        """What ranks here need to reach those of other tasks, once all have come."""
        while self._address is None:
            self._hear()
        return Secret(token=self.token, host=self._address, beside=(0, 0))

    def lost(self, error: OSError) -> RunError:
        """Task 0 is gone: what to say. An engine that must be asked to start the run again is asked."""
        where = f"{self.first[0]}:{self.first[1]}"
        fix = "its host has the run folder: start all tasks again with --resume, task 0 where that folder is seen."
        if self.outlives:
            who = ask_again(self.place, os.environ)
            fix = f"{who} again, on the hosts that are left: the run goes on with what was saved."
        return RunError(f"task 0 at {where} is gone: {error.strerror or error}.", fix=fix)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Say what is about to be done; returns when all tasks do the same."""
        self.say({"op": "begin", "facts": dict(facts)})
        head, _ = self._next()
        if head["op"] == "end":
            self._ended(head)
        assert head["op"] == "agreed", head
        self.has_begun = True

    def consult(self, said: dict[str, Any], send: Callable[[Trunk, str], None]) -> dict[str, Any]:
        """Say what is known here of a run folder, and `send` of it what task 0 wants; returns what that decides."""
        self.say({"op": "said", "said": said})
        while True:
            head, _ = self._next()
            if head["op"] == "end":
                self._ended(head)
            elif head["op"] == "bring":
                try:
                    send(self.trunk, head["what"])
                except ConnectionError as error:
                    raise self.lost(error) from error
                self.say({"op": "brought"})
            else:
                assert head["op"] == "answer", head
                return head

    def say(self, head: dict[str, Any], body: bytes = b"") -> None:
        try:
            self.trunk.send(head, body)
        except OSError as error:
            self._hear_last()
            raise self.lost(error) from error

    def _hear_last(self) -> None:
        """Task 0 hears nothing any more; where its last word was why, that is all there is to say."""
        with suppress(RunError):
            while True:
                self._hear()
        if not self.has_begun and (told := [head for head, _ in self._waiting if head["op"] == "end"]):
            self._ended(told[0])

    def fail(self, error: BaseException) -> NoReturn:
        """This task cannot go on; task 0 tells it."""
        self.say({"op": "failed", "error": describe(error)})
        while True:
            head, _ = self._next()
            if head["op"] == "end":
                self._ended(head)

    def _ended(self, head: Mapping[str, Any]) -> Any:
        self.has_begun = False
        if head["error"] is not None:
            error = revive(head["error"])
            self._outstay()
            raise EchoError(f"task 0 has told why: {error.what}")
        return head["summary"]

    def _outstay(self) -> None:
        """Let task 0 say what is wrong and end: most engines end all tasks with the first that does."""
        patience_s = self.trunk.socket.gettimeout()
        self.trunk.socket.settimeout(_TELLS_S)
        with suppress(OSError):
            while True:
                self._waiting += self.trunk.read()
        self.trunk.socket.settimeout(patience_s)

    def follow(
        self,
        make: Callable[[Round], tuple[Main, int, Start]],
        *,
        guardian: Guardian,
        hand_on: Callable[[Path, Path, Callable[[int], str | None]], None] | None = None,
    ) -> Any:
        """Run the rounds of ranks that task 0 wants; returns its summary. `make` gives what a rank runs, the threads
        that it has and how it is started; `hand_on` is called where task 0 is lost and a rank here may hold all that is
        trained, with the run folder, the one to which ranks here write, and what has one of them do so."""
        with scratch_folder() as given:
            arrivals = Arrivals(given / "given", 0)
            (given / "given").mkdir()
            self.say({"op": "ready"})
            number, copies = 0, None
            while True:
                head, body = self._next()
                if head["op"] == "end":
                    if copies is not None:
                        copies.discard()
                    return self._ended(head)
                if head["op"] in ("file", "place"):
                    arrivals.take(head, body)
                elif head["op"] == "round":
                    number += 1
                    shared = Path(head["folder"]) if head["folder"] else None
                    is_shared = shared is not None and not self._sends and (shared / head["marker"]).exists()
                    folder = shared if is_shared and shared is not None else given / f"run-{number}"
                    folder.mkdir(exist_ok=True)
                    resume = given / "given" / Path(head["resume"]).name if head["resume"] else None
                    local = range(head["first"], head["first"] + head["count"])
                    found = Round(
                        info=head, local=local, folder=folder, resume=resume, clock_ns=self._clock_ns
                    )
                    keep = None
                    if hand_on is not None and shared is not None and head["holds_all"]:
                        keep = partial(hand_on, shared, folder)
                    if head.get("outlives") and shared is not None and not is_shared:
                        copies = Arrivals(shared / COPY_NAME, 0)
                        self.say({"op": "apart"})
                    run = LocalRanks(
                        self.trunk, self._waiting, self.lost, head["number"], folder, is_shared, keep, copies
                    )
                    main, threads, start = make(found)
                    call = self._caller(head["number"])
                    run.run(main, found.local, head["ranks"], threads, start, guardian, call, self._secret())
                    if not is_shared:
                        shutil.rmtree(folder, ignore_errors=True)
                    self.say({"op": "done"})
                    self.say({"op": "ready"})

    def own_store(self, timeout_s: float) -> RunStore:
        """The store of a run whose ranks are the tasks themselves, from the side of this one."""
        hello = {"op": "seat", "rank": self.place.task}
        reach = Reach(self.place.task, self._secret(), timeout_s)
        _, made = dial(self.first, self.token, hello, timeout_s=_LINE_S, source=self._chosen)
        return RunStore(made.detach(), self.place.task, timeout_s, reach=reach)

    def _caller(self, number: int) -> Callable[[int], socket.socket]:
        """Makes the line of a rank to the switchboard of task 0."""

        def call(rank: int) -> socket.socket:
            hello = {"op": "line", "round": number, "rank": rank}
            answer, made = dial(self.first, self.token, hello, timeout_s=_LINE_S, source=self._chosen)
            if "refused" in answer:
                made.close()
                raise RunError(f"task 0 refuses rank {rank}: {answer['refused']}")
            return made

        return call

    def close(self) -> None:
        """Hang up."""
        self.trunk.close()


def _call_first(
    place: Place, token: bytes, hello: dict[str, Any], source: str | None, patience_s: float
) -> tuple[Address, socket.socket]:
    """Find task 0 at one of its addresses, and of the ports that the token names."""
    hosts, deadline, last = addresses_of_first(place), time.monotonic() + patience_s, "nobody listens there"
    host, ports = " or ".join(hosts), ports_of(token)
    differs_at: float | None = None
    while True:
        unreached: set[str] = set()  # in this round
        for address in (
            (host, port) for port in ports for host in hosts
        ):  # who does not answer takes seconds
            if address[0] in unreached:
                continue
            try:
                answer, made = dial(address, token, hello, timeout_s=_LINE_S, source=source)
            except StrangerError as error:
                last = str(error)
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError):
                    last = error.strerror or str(error)
                if isinstance(error, UnreachedError):
                    unreached.add(address[0])
            else:
                if "refused" not in answer:
                    return address, made
                made.close()
                if not answer.get("differs"):
                    raise UsageError(f"task 0 at {address[0]} refuses this task: {answer['refused']}")
                differs_at = differs_at or time.monotonic()
        if differs_at is not None and time.monotonic() - differs_at > DIFFERS_S + _TELLS_S:
            raise EchoError(f"task 0 at {host} has told that it is one of another number of tasks.")
        if time.monotonic() > deadline:
            raise UsageError(
                f"task {place.task} of {place.tasks} did not find task 0 at {host} within {patience_s:g} s: {last}.",
                fix="see that task 0 was started and has the same token (docs/hosts.md); PLAIT_FIRST_ADDRESS names "
                "another address of its host.",
            )
        ports = [*ports[1:], ports[0]]  # a stranger may hold one so that nobody is answered there
        time.sleep(_CALL_S)
