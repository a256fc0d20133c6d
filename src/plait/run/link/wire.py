"""What workers and servers send each other: a header of eight numbers, then flat tensors of a layout that both know.

In: kinds, numbers, tensors. Out: bytes, and back. The messages from one rank to another are numbered, so that whoever
receives them knows the name of the next one; weights that were asked for have names of their own. No pickle travels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from plait.program.program import Bucket

HEADER_BYTES = 64
"""Before every message: a cache line."""


class MessageKind(IntEnum):
    """What a message is."""

    PUSH = 0
    """A server's shard of a bucket, then the bucket's scalars."""
    BUFFERS = 1
    """The buffers of a model, after a step."""
    SKIP = 2
    """A worker has no samples of a step."""
    PULL = 3
    """A worker asks for weights."""
    BYE = 4
    """Nothing more comes from a worker."""
    SQUARES = 5
    """From server to server: the sum of squares of its part of an update's gradients."""
    STATE = 6
    """To the first server: what another one holds, for a checkpoint."""
    EXCHANGE = 7
    """To the rank that has the center: how far it moves (one float64), then flat weights to move towards."""
    PAUSE = 8
    """A worker has done all that it took of the steps before one, and waits until they are saved; and that they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What a message says beside its tensors."""

    kind: MessageKind
    index: int = 0
    """The bucket, or of squares the worker."""
    step: int = 0
    number: int = 0
    """Of a pull or an exchange: how many this worker has asked for before."""
    counts: bool = True
    """Of a pull: whether it is training that it serves."""
    shares: int = 0
    """Of an exchange and a bye: shares of steps that the worker has done."""

    def pack(self) -> Tensor:
        """As bytes."""
        words = [self.kind, self.index, self.step, self.number, int(self.counts), self.shares, 0, 0]
        return torch.tensor(words, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def of(cls, message: Tensor) -> "Head":
        """Of the message that begins with it."""
        kind, index, step, number, counts, shares, *_ = message[:HEADER_BYTES].view(torch.int64).tolist()
        return cls(
            kind=MessageKind(kind), index=index, step=step, number=number, counts=bool(counts), shares=shares
        )


class Post(Protocol):
    """Messages of bytes between any two ranks."""

    def send(self, message: str, to: int, *parts: Tensor) -> None:
        """Leave a message; its parts may be written to afterwards."""

    def take(self, message: str, source: int, use: Callable[[Tensor], None]) -> bool:
        """Where a message is there: have its bytes used, and forget it. Never waits."""

    def wait(self, message: str, source: int, use: Callable[[Tensor], None]) -> None:
        """Wait for a message and have its bytes used; an error where its sender is gone."""


class Streams:
    """Numbered messages between this rank and others."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.sent_bytes = 0
        self.taken = 0
        """Messages so far."""
        self._sent: dict[int, int] = {}
        self._taken: dict[int, int] = {}

    def send(self, to: int, head: Head, *tensors: Tensor) -> None:
        """Send the next message to a rank."""
        number = self._sent[to] = self._sent.get(to, -1) + 1
        self.send_named(str(number), to, head, *tensors)

    def send_named(self, name: str, to: int, head: Head, *tensors: Tensor) -> None:
        """Send a message that is asked for by its name."""
        parts = [as_bytes(tensor) for tensor in tensors]
        self.sent_bytes += sum(part.numel() for part in parts)
        self.post.send(name, to, head.pack(), *parts)

    def take(self, source: int, use: Callable[[Head, Tensor], None]) -> bool:
        """Have the next message of a rank used, where it is there."""
        number = self._taken.get(source, 0)
        found = self.post.take(str(number), source, lambda m: use(Head.of(m), m[HEADER_BYTES:]))
        if found:
            self._taken[source] = number + 1
            self.taken += 1
        return found


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements of a tensor, in order, as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def num_weights(bucket: Bucket) -> int:
    """Elements of a bucket without its scalars."""
    return bucket.num_elements - len(bucket.scalars)


def part_of(bucket: Bucket, server: int, servers: int) -> tuple[int, int]:
    """(start, end) of the elements of a bucket that a server holds."""
    count = num_weights(bucket)
    size = -(-count // servers)
    return min(server * size, count), min((server + 1) * size, count)


def saved_name(step: int) -> str:
    """The message that all before a step is saved."""
    return f"saved {step}"


def weights_name(bucket: int, number: int) -> str:
    """The message with the weights of a bucket, of a worker's pull or exchange."""
    return f"weights {bucket} {number}"
