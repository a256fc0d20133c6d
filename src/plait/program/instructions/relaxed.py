"""What workers do that do not meet in every step: they mix weights now and then, or have servers or a center."""

from dataclasses import dataclass
from typing import Literal

from plait.program.instructions.base import Instruction, Lane, TimeKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Flatten(Instruction):
    """Copy weights, or buffers, of this worker into one flat tensor."""

    kind: TimeKind = "update"
    flat: int
    """Position in the rank's `averages`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookahead(Instruction):
    """Move weights along their momentum, to where their gradients are taken; the flat tensor keeps where they were."""

    kind: TimeKind = "update"
    flat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Momentum(Instruction):
    """Take as momentum how far weights are from where they were before `Lookahead`."""

    kind: TimeKind = "update"
    flat: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(Instruction):
    """Send a flat tensor to the rank that has the center, which moves towards it; where it was comes back.

    That may be used after the `Wait` that names it.
    """

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    flat: int
    rule: Literal["elastic", "share"]
    """How far the center moves: by the learning rate times rho, or by this worker's share in the mean of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix(Instruction):
    """Move weights by those of others: to the mean of all, by an outer step towards it, by an elastic force; or `take`
    those of the first."""

    kind: TimeKind = "update"
    flat: int
    rule: Literal["mean", "outer", "elastic", "take"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Push(Instruction):
    """Send a bucket's gradients to the servers, each its shard; the worker does not wait."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PushBuffers(Instruction):
    """Send new values of buffers to the first server, who saves them."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    buffers: tuple[str, ...]
    """Buffer names, in the order of `reads`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull(Instruction):
    """Ask the servers for the parameters of a bucket; they may be used after the `Wait` that names it."""

    kind: TimeKind = "communication"
    lane: Lane = "communication"
    bucket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome(Instruction):
    """Read the total and the weight of what this worker has computed: the gradients are the servers' affair."""

    kind: TimeKind = "update"
    late_weight: bool
    """Whether the weight is known only now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor(Instruction):
    """Before the first step: what workers are drawn to is where they are, and nothing moves yet."""

    kind: TimeKind = "update"
    center: bool
    """Whether every worker keeps the center; else another rank has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(Instruction):
    """After the last step: tell the servers that nothing more comes from this worker."""

    kind: TimeKind = "communication"


Handler = Literal["push", "buffers", "skip", "exchange", "pull", "bye", "squares", "state", "update"]
"""What a server can be busy with: messages, by their kind, and updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve(Instruction):
    """Hold weights for the whole run: take what workers send, apply updates, give weights, as requests come in.

    What comes next is not known beforehand: it is a queue with a handler for every kind of message.
    """

    kind: TimeKind = "update"
    handlers: tuple[Handler, ...]
    """What it may be busy with; the one at position n counts as instruction `id` + 1 + n in a trace."""
    order: Literal["step", "arrival", "turn"]
    """When an update is due: once a step, when all workers have pushed; with each message; or with each one in turn."""
    bound: int = 0
    """With `step`: how many updates weights may lack that are given for a step."""
    gives: tuple[int, ...] = ()
    """Buckets in the order in which a forward needs their weights."""
    buffers: tuple[str, ...] = ()
    """Buffers that come with the gradients."""

    def work(self, handler: Handler) -> int:
        """What a piece of work counts as in a trace."""
        return self.id + 1 + self.handlers.index(handler)
