"""What ranks of `data` exchange in the middle of code that plait does not know.

In: tensors of numbers, each with the name of the place where it is exchanged. Out: those of all ranks that are at that
place. It goes in rounds that every rank takes part in, one with no samples too: a rank that takes another branch delays
nobody, and is not counted where it is not. Where ranks are at several places, the earliest has the first round, so that
who skips a place waits for the others at the next one.
"""

import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from plait.plan.plan import DATA
from plait.program.instructions import Collective
from plait.run.link.links import Links

LAST = 1 << 40
"""The turn of what all ranks with samples come to, when the model is done."""
Meet = Callable[[Collective, Tensor], Tensor]
"""Starts a collective and waits for its result."""


class Company:
    """One rank among those that run shares of the same micro-batch."""

    def __init__(self, ranks: int, meet: Meet, device: torch.device) -> None:
        self._ranks, self._meet, self._device = ranks, meet, device
        self._times: dict[str, int] = {}
        self._told: dict[int, list[Tensor]] = {}
        """What others exchanged where this rank was not."""

    @property
    def has_met(self) -> bool:
        """Whether this rank came to any place."""
        return bool(self._times)

    def gather(self, place: str, numbers: Tensor, turn: int = LAST) -> Tensor:
        """One row for each rank that is here, in the order of ranks; `place` may be reached several times.

        `turn`: where the place is in the order of the model's modules.
        """
        code = self._code(place)
        while True:
            rows, here = self._round(code, numbers, turn)
            if here:
                return rows.to(numbers.dtype)

    def gather_late(self, place: str, numbers: Tensor, turn: int) -> Tensor:
        """As `gather`, with rows of ranks that were here before, first."""
        code = self._code(place)
        while True:
            rows, here = self._round(code, numbers, turn)
            if here:
                return torch.cat([*self._told.get(code, ()), rows]).to(numbers.dtype)

    def _code(self, place: str) -> int:
        time = self._times[place] = self._times.get(place, 0) + 1
        return int.from_bytes(hashlib.sha256(f"{place} {time}".encode()).digest()[:7], "big") + 1

    def leave(self) -> None:
        """This rank's share is done: take part until those of all others are."""
        while self._round(0, None, LAST)[0].numel():
            pass

    def _round(self, code: int, numbers: Tensor | None, turn: int) -> tuple[Tensor, bool]:
        """The rows of the earliest place that somebody is at, and whether this rank is there; nothing: all left."""
        count = numbers.numel() if numbers is not None else 0
        heads = self._all(torch.tensor([code, count, turn]))
        waiting = [(when, place, size) for place, size, when in heads.tolist() if place]
        if not waiting:
            return torch.empty(0), False
        _, place, size = min(waiting, key=itemgetter(0))
        here = place == code and numbers is not None
        own = numbers.reshape(-1).double() if here and numbers is not None else torch.zeros(size).double()
        rows = self._all(own)
        at = [index for index, head in enumerate(heads.tolist()) if head[0] == place]
        if not here:
            self._told.setdefault(place, []).append(rows[at])
        return rows[at], here

    def _all(self, numbers: Tensor) -> Tensor:
        gathering = Collective(
            id=-1, name="meet", op="all_gather", axis=DATA, extents=(numbers.numel(),) * self._ranks
        )
        return self._meet(gathering, numbers.to(self._device)).view(self._ranks, -1)


def at_once(links: Links) -> Meet:
    """In a process of its own a rank waits inside its links."""
    return lambda collective, tensor: links.start(collective, tensor).result()


class Turns:
    """Code that meets other ranks of the same process: it runs in a thread, which rests while others move.

    What threads of one process share (random generators, the default dtype) is put aside meanwhile.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self.num_met = 0
        """Meetings so far: whoever looks for a deadlock sees that something moves."""
        self._asked: queue.Queue[tuple[Collective, Tensor] | None] = queue.Queue()
        self._answers: queue.Queue[Tensor | None] = queue.Queue()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, function: Callable[[Meet], Any]) -> Iterator[None]:
        """Yields while another rank has to move first; `result` is what the function returned."""
        shared = _Shared()
        thread = threading.Thread(target=self._work, args=(function,), daemon=True)
        thread.start()
        try:
            while (asked := self._asked.get()) is not None:
                own = _Shared()
                shared.restore()
                handle = self._links.start(*asked)
                self.num_met += 1
                while not handle.ready():
                    yield
                found, shared = handle.result(), _Shared()
                own.restore()
                self._answers.put(found)
        finally:
            self._answers.put(None)
            thread.join()
            shared.restore()

    @property
    def result(self) -> Any:
        """Of the function; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result

    def _work(self, function: Callable[[Meet], Any]) -> None:
        try:
            self._result = function(self._meet)
        except BaseException as error:
            self._error = error
        finally:
            self._asked.put(None)

    def _meet(self, collective: Collective, tensor: Tensor) -> Tensor:
        self._asked.put((collective, tensor))
        answer = self._answers.get()
        if answer is None:
            raise AbandonedError
        return answer


class AbandonedError(Exception):
    """The run has ended while this rank waited."""


class _Shared:
    """What all threads of a process have in common, as it is now."""

    def __init__(self) -> None:
        self._numbers, self._dtype = torch.get_rng_state(), torch.get_default_dtype()

    def restore(self) -> None:
        torch.set_rng_state(self._numbers)
        torch.set_default_dtype(self._dtype)
