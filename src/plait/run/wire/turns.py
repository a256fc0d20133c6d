"""Collectives of one group that are under way, and the thread that moves them on.

In: collectives as generators, which post one exchange of messages after the other. Out: futures. What a collective
sends first leaves behind what was to be sent before, whether that has arrived or not: the wire is not idle for as long
as a message and its answer travel.
"""

import queue
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from plait.run.wire.inbox import Done
from plait.threads import or_end_the_rank, start_thread

Waits = Sequence[tuple[int, Done]]
"""An exchange under way: messages from and to peers, by their place in the group."""
Turns = Generator[Waits, None, None]
"""A collective: it yields what it waits for, and goes on when all of it is there."""


@dataclass(kw_only=True, slots=True, eq=False)
class _UnderWay:
    what: str
    turns: Turns
    done: "Future[None]" = field(default_factory=Future)
    waits: Waits = ()

    def fail(self, error: BaseException) -> None:
        if isinstance(error, ConnectionError):
            error = ConnectionError(f"{self.what}: {error}")
        self.done.set_exception(error)


class InTurns:
    """The thread of one group."""

    def __init__(self, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        """`timeout_s`: after which nothing more is expected where nothing at all has come."""
        self._ranks, self._timeout_s = ranks, timeout_s
        self._queue: queue.SimpleQueue[_UnderWay | None] = queue.SimpleQueue()
        """Collectives that may go on; None: the group ends."""
        self._thread = threading.Thread(
            target=or_end_the_rank(self._work), name=f"plait group {name}", daemon=True
        )
        start_thread(self._thread)

    def start(self, what: str, turns: Turns) -> "Future[None]":
        """Have a collective made."""
        entry = _UnderWay(what=what, turns=turns)
        self._queue.put(entry)
        return entry.done

    def close(self) -> None:
        """End the thread; what is under way is finished first."""
        self._queue.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        under_way: set[_UnderWay] = set()
        ends = False
        while under_way or not ends:
            try:
                entry = self._queue.get(timeout=self._timeout_s if under_way else None)
            except queue.Empty:
                for late in under_way:
                    late.fail(self._too_late(late.waits))
                under_way.clear()
                continue
            if entry is None:
                ends = True
            elif entry in under_way or not entry.waits:  # else it was too late
                under_way.add(entry)
                if self._advance(entry):
                    under_way.discard(entry)

    def _advance(self, entry: _UnderWay) -> bool:
        """Go on with a collective as far as it can; whether it is over."""
        try:
            while True:
                for _, message in entry.waits:
                    if not message.done():
                        message.add_done_callback(lambda _: self._queue.put(entry))
                        return False
                    message.result()
                entry.waits = next(entry.turns)
        except StopIteration:
            entry.done.set_result(None)
        except BaseException as error:
            entry.fail(error)
        return True

    def _too_late(self, waits: Waits) -> ConnectionError:
        missing = sorted({self._ranks[peer] for peer, message in waits if not message.done()})
        return ConnectionError(
            f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))} did not come within "
            f"{self._timeout_s:g} s: timed out."
        )
