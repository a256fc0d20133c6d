"""What the stages of a pipeline give each other, and in which order a rank makes room for it.

In: the actions of all ranks. Out: what an action needs of others, messages, and the order of receives: for each sender
that in which it sends. Links such as NCCL's know a message by nothing but that order. It knows no models: which stages
exchange anything beside their neighbours is told by whoever asks.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.program.stage.schedules.base import Action

Direction = Literal["forward", "backward"]
"""Of activations, or of their gradients."""

Made = tuple[Direction, int, int]
"""What an action gives other stages: direction, its own stage, micro-batch."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one stage gives another of a micro-batch."""

    direction: Direction
    source: int
    """Stage that sends."""
    to: int
    """Stage that receives."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.direction} {self.source}>{self.to} micro-batch {self.micro_batch}"

    @property
    def made(self) -> Made:
        """What it carries."""
        return self.direction, self.source, self.micro_batch


def direction_of(action: Action) -> Direction | None:
    """Which way an action's results travel; None: gradients of parameters stay."""
    if action.kind == "weight":
        return None
    return "forward" if action.kind == "forward" else "backward"


def makes(action: Action) -> Made | None:
    """What an action gives other stages."""
    direction = direction_of(action)
    return None if direction is None else (direction, action.stage, action.micro_batch)


def needs(action: Action, stages: int) -> Made | None:
    """What an action needs of its neighbour before it can start; None: nothing that another action makes."""
    direction = direction_of(action)
    if direction is None:
        return None
    source = action.stage - 1 if direction == "forward" else action.stage + 1
    return (direction, source, action.micro_batch) if 0 <= source < stages else None


class Inbox:
    """The messages of one rank that are still to be received, sender by sender."""

    def __init__(self, messages: Iterable[Message], schedule: Sequence[Sequence[Action]]) -> None:
        """`schedule`: the actions of all ranks; stage s is on rank s % ranks. An action sends by ascending stages."""
        positions = [{makes(action): at for at, action in enumerate(own)} for own in schedule]
        by_rank: dict[int, list[Message]] = {}
        for message in messages:
            by_rank.setdefault(message.source % len(schedule), []).append(message)
        self._open = {
            rank: deque(sorted(found, key=lambda m: (positions[m.source % len(schedule)][m.made], m.to)))
            for rank, found in by_rank.items()
        }
        self._ranks = len(schedule)
        self._asked: set[Message] = set()

    def up_to(self, message: Message) -> list[Message]:
        """What its sender sends until then and was not asked for before; these must be received in this order."""
        queue = self._open[message.source % self._ranks]
        found: list[Message] = []
        while message not in self._asked:
            found.append(queue.popleft())
            self._asked.add(found[-1])
        return found
