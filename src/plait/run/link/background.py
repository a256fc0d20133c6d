"""Communication that goes on while the rank computes: a thread that does one thing after the other.

In: functions, in the order in which all ranks of a group give them. Out: handles. What fails is raised where its result
is wanted.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import Tensor

from plait.threads import or_end_the_rank, start_thread

HopSpan = tuple[str, int, int]
"""A message of a collective: its name, and when it was asked for and there, by `time.perf_counter_ns`."""


class Background:
    """One thread, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Tensor]]] = queue.SimpleQueue()
        start_thread(threading.Thread(target=or_end_the_rank(self._work), name=f"plait {name}", daemon=True))

    def start(self, run: Callable[[], Tensor], hops: Sequence[HopSpan] = ()) -> "UnderWay":
        """Have it done once all that was started before is done; `hops`: filled meanwhile, for the trace."""
        done: Future[Tensor] = Future()
        self._queue.put((run, done))
        return UnderWay(done, hops)

    def _work(self) -> None:
        while True:
            run, done = self._queue.get()
            try:
                done.set_result(run())
            except BaseException as error:
                done.set_exception(error)


class UnderWay:
    """What a thread does."""

    def __init__(self, done: "Future[Tensor]", hops: Sequence[HopSpan]) -> None:
        self._done = done
        self.hops = hops
        """What it was made of, once it is done."""

    def ready(self) -> bool:
        """Processes wait in `result`."""
        return True

    def result(self) -> Tensor:
        """Wait for it; what it waits for has limits of its own."""
        return self._done.result()

    def is_done(self) -> bool:
        """Whether it is over, one way or the other."""
        return self._done.done()

    def tell(self, settle: Callable[[BaseException | None], None]) -> None:
        """Have it told when it is over: with the error, where it failed."""
        self._done.add_done_callback(lambda done: settle(done.exception()))
