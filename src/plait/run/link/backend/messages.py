"""send and recv of torch.distributed through shared memory.

In: tensors, a rank, a tag. Out: works. Messages of one pair and tag are taken in the order in which they were sent; a
message of another size or dtype than the tensor is told, never copied.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError
from plait.run.link.shm.bell import Bells, look_at
from plait.run.link.shm.memory import Arena, flat_of
from plait.run.link.shm.messages import Mail
from plait.run.link.shm.task import DTYPES

_HEAD_BYTES = 64
"""Before every message: its dtype."""


class Messages:
    """The messages of one rank of a group."""

    def __init__(
        self, arenas: Sequence[Arena], own: int, names: Sequence[str], bells: Bells, timeout_s: float
    ) -> None:
        self._arenas, self._own, self._names, self._bells = arenas, own, names, bells
        self._timeout_s = timeout_s
        self._mail = Mail(arenas, own, bells, lambda is_over, rank, what: self.until(is_over, what, rank))
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._asked: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._lock = threading.Lock()

    def send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        """Leave a message; the tensor may be written to afterwards."""
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[0] = _code(tensor)
        with self._lock:
            number = self._sent[to, tag]
            self._sent[to, tag] += 1
            self._mail.send(_name(tag, number), to, head, flat_of(tensor).view(torch.uint8))
        return _Sent()

    def receive(self, tensor: Tensor, source: int | None, tag: int) -> dist.Work:
        """Have the next message of a rank, or of any, in `tensor`."""
        sources = [source] if source is not None else [r for r in range(len(self._arenas)) if r != self._own]
        if source is None:
            return _Received(self, tensor, sources, tag, None)
        number = self._asked[source, tag]
        self._asked[source, tag] += 1
        return _Received(self, tensor, sources, tag, number)

    def take(self, tensor: Tensor, source: int, tag: int, number: int | None) -> bool:
        """Where a message is there: copy it."""
        known = self._asked[source, tag] if number is None else number
        with self._lock:
            found = self._mail.take(
                _name(tag, known), source, lambda message: self._read(message, tensor, source)
            )
        if found and number is None:
            self._asked[source, tag] += 1
        return found

    def _read(self, message: Tensor, tensor: Tensor, source: int) -> None:
        code, count = int(message[0]), message.numel() - _HEAD_BYTES
        if code != _code(tensor) or count != tensor.nbytes:
            raise RunError(
                f"{self._names[source]} sent {count:,} bytes of {_dtype(code)} where {self._names[self._own]} expects "
                f"{tensor.nbytes:,} of {tensor.dtype}.",
                fix="receive into a tensor like the one that is sent.",
            )
        if count:
            payload = message[_HEAD_BYTES:].view(tensor.dtype)
            with torch.no_grad():
                tensor.copy_(payload.view(tensor.shape))

    def until(self, is_over: Callable[[], bool], what: str, *sources: int) -> None:
        """Wait; an error where the ranks that may move are gone or too late."""
        self._bells.until(is_over, look_at(self._arenas, self._names, sources, what, self._timeout_s))


class _Sent(dist.Work):
    """A message that its sender has left."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class _Received(dist.Work):
    """A message that may not have come yet; it is copied by whoever waits for it."""

    def __init__(
        self, messages: Messages, tensor: Tensor, sources: Sequence[int], tag: int, number: int | None
    ) -> None:
        super().__init__()
        self._messages, self._tensor, self._sources = messages, tensor, sources
        self._tag, self._number = tag, number
        self._source: int | None = None

    def is_completed(self) -> bool:
        if self._source is None:
            for source in self._sources:
                if self._messages.take(self._tensor, source, self._tag, self._number):
                    self._source = source
                    break
        return self._source is not None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._messages.until(self.is_completed, f"a message with tag {self._tag}", *self._sources)
        return True

    def _source_rank(self) -> int:
        assert self._source is not None
        return self._source

    def get_future(self) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = torch.futures.Future()

        def attend() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(RuntimeError(str(error)))
            else:
                future.set_result([self._tensor])

        threading.Thread(target=attend, daemon=True).start()
        return future


def _name(tag: int, number: int) -> str:
    return f"{tag} {number}"


def _code(tensor: Tensor) -> int:
    return DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else len(DTYPES)


def _dtype(code: int) -> str:
    return str(DTYPES[code]) if code < len(DTYPES) else "another dtype"
