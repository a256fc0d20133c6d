"""A server: what `Serve` does. It takes what workers send and gives them weights, one message at a time.

In: messages of workers and of other servers. Out: updates of what it holds, and answers. When an update is applied and
a request answered is the rule's decision (`program/serve/`); what an update is, that of the `Holder`: an optimizer step
on gradients, or a center that moves. `execute` is a generator that yields while there is nothing to do, so that all of
a run's servers and workers can share one process; it never waits for anybody.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.program.instructions import Handler, Serve
from plait.program.program import RankProgram
from plait.program.serve.rule import Due, ServerRule, rule_of
from plait.run.hold.state import ModelState
from plait.run.link.wire import Head, MessageKind, Post, Streams, saved_name, weights_name

Message = tuple[Head, Tensor]
"""A message of a contribution, and its bytes."""
Contribution = dict[int, Message]
"""A contribution: its buckets, and buffers as -1."""


@dataclass(slots=True)
class Sender:
    """What a server knows of a worker."""

    parts: Contribution = field(default_factory=dict)
    """What has come of its next contribution."""
    pushed: deque[Contribution] = field(default_factory=deque)
    """Contributions that are complete and not yet applied; empty where the worker had no samples."""
    number: int = 0
    """Contributions that were complete so far."""
    asks: deque[Head] = field(default_factory=deque)
    """Requests that were not answered yet."""
    shares: int = 0
    """Shares of steps that it says it has done."""
    left: bool = False
    paused_at: int | None = None
    """The step before which it waits for a save."""


class Holder(Protocol):
    """What a server holds, and what an update does to it."""

    num_parts: int
    """Messages that make a contribution."""

    def completed(self, worker: int) -> None:
        """A contribution is there."""

    def is_ready(self, due: Due) -> bool:
        """Whether an update can be applied now."""

    def apply(self, due: Due, pushed: Sequence[Contribution]) -> None:
        """Do it."""

    def take(self, shard: int, head: Head, message: Tensor) -> None:
        """A message of another server."""

    def give(self, index: int) -> Sequence[Tensor]:
        """The weights of a bucket."""

    def steps(self) -> int:
        """Steps of the job that are in what is held."""


class Service:
    """One of a run's servers."""

    def __init__(
        self, plan: Plan, rank: int, post: Post, state: ModelState, own: RankProgram, serve: Serve
    ) -> None:
        self.plan, self.shard, self.state, self.own, self.serve = (
            plan,
            rank - plan.mesh.size,
            state,
            own,
            serve,
        )
        self.streams = Streams(post)
        self.start = state.steps_done
        self.rule: ServerRule = rule_of(serve, plan.mesh.size, self.start)
        self.workers = [Sender() for _ in range(plan.mesh.size)]
        self.states: dict[tuple[int, int], Tensor] = {}
        """What other servers hold, by (shard, step): for a checkpoint."""
        self.reached = self.start
        """The step after the last one of any worker."""
        self.after_update: Callable[[], Iterator[None]] | None = None
        """Called after each update; may take its time."""
        self.on_pause: Callable[[int], Iterator[None]] = lambda step: iter(())
        """Called where all workers wait before a step, and all that they sent is applied; may take its time."""
        self.on_wait: Callable[[int, bool], None] = lambda step, waits: None
        """Called where some of them wait before a step and others are still to come, and (False) once all have."""
        self.is_gone: Callable[[int], bool] = lambda rank: False
        """Whether a rank has died."""
        self.on_work: Callable[[Handler | None, int], None] = lambda what, step: None
        """Called before a piece of work, and (None) after it."""
        self.holder: Holder
        """What this server holds; given by whoever makes it."""

    def execute(self) -> Iterator[None]:
        """Serve until all workers have left and nothing is to be done."""
        busy_before = True
        while True:
            busy = self.poll()
            while (due := self.rule.due()) is not None and self.holder.is_ready(due):
                self._apply(due)
                if self.after_update is not None:
                    yield from self.after_update()
                busy = True
            busy = self._answer() or busy
            if (step := self._all_paused_at()) is not None:
                yield from self._go_on(step)
                continue
            if all(worker.left for worker in self.workers) and self.rule.due() is None:
                return
            if not busy:
                self._look_for_the_dead()
                if (paused := [w.paused_at for w in self.workers if w.paused_at is not None]) and busy_before:
                    self.on_wait(min(paused), True)
                yield
            busy_before = busy

    def _all_paused_at(self) -> int | None:
        """The step before which all wait who have not left, once all before it is applied."""
        paused = [worker.paused_at for worker in self.workers if not worker.left]
        steps = [step for step in paused if step is not None]
        return min(steps) if steps and len(steps) == len(paused) and self.rule.due() is None else None

    def _go_on(self, step: int) -> Iterator[None]:
        """Have all before a step saved, and tell those who wait for it."""
        self.on_wait(step, False)
        yield from self.on_pause(step)
        for rank, worker in enumerate(self.workers):
            if worker.paused_at == step:
                worker.paused_at = None
                self.streams.send_named(saved_name(step), rank, Head(kind=MessageKind.PAUSE, step=step))

    def poll(self) -> bool:
        """Take at most one message from everybody; whether there was any."""
        found = False
        for rank in range(self.plan.ranks):
            if rank != self.plan.mesh.size + self.shard:
                found = self.streams.take(rank, lambda head, m, rank=rank: self._take(rank, head, m)) or found  # type: ignore[misc]
        return found

    def _take(self, rank: int, head: Head, message: Tensor) -> None:
        if head.kind is MessageKind.PAUSE:
            self.workers[rank].paused_at = head.step
            return
        if head.kind is MessageKind.PULL:  # no work before it may be answered
            self.workers[rank].asks.append(head)
            return
        self.on_work(_HANDLERS[head.kind], head.step)
        match head.kind:
            case MessageKind.STATE:
                self.states[rank - self.plan.mesh.size, head.step] = message.clone()
            case MessageKind.SQUARES:
                self.holder.take(rank - self.plan.mesh.size, head, message)
            case MessageKind.BYE:
                self.reached = max(self.reached, head.step)
                self.workers[rank].shares = head.shares
                self._leave(rank)
            case MessageKind.SKIP:
                self.workers[rank].pushed.append({})
                self._complete(rank, head.step)
            case MessageKind.PUSH | MessageKind.BUFFERS | MessageKind.EXCHANGE:
                worker = self.workers[rank]
                index = -1 if head.kind is MessageKind.BUFFERS else head.index
                worker.parts[index] = (head, message.clone())
                if len(worker.parts) == self.holder.num_parts:
                    worker.pushed.append(worker.parts)
                    worker.parts = {}
                    self._complete(rank, head.step)
        self.on_work(None, head.step)

    def _complete(self, rank: int, step: int) -> None:
        self.workers[rank].number += 1
        self.rule.push(rank, step)
        self.holder.completed(rank)

    def _leave(self, rank: int) -> None:
        self.workers[rank].left = True
        self.rule.leave(rank)

    def _look_for_the_dead(self) -> None:
        for rank, worker in enumerate(self.workers):
            if not worker.left and self.is_gone(rank):
                worker.asks.clear()
                worker.paused_at = None
                self._leave(rank)

    @torch.no_grad()
    def _apply(self, due: Due) -> None:
        """One update."""
        self.on_work("update", due.step)
        self.holder.apply(due, [self.workers[worker].pushed.popleft() for worker in due.workers])
        self.rule.done()
        self.state.steps_done = self.holder.steps()
        self.on_work(None, due.step)

    def _answer(self) -> bool:
        """Give weights to those whose request may be answered; whether there was any."""
        found = False
        for rank, worker in enumerate(self.workers):
            while worker.asks and self.rule.may_pull(rank, worker.asks[0].step):
                head = worker.asks.popleft()
                self.on_work("pull", head.step)
                if head.counts:
                    self.rule.pulled(rank, head.step)
                for index in self.serve.gives:
                    self.send_weights(rank, index, head)
                self.on_work(None, head.step)
                found = True
        return found

    def send_weights(self, rank: int, index: int, head: Head) -> None:
        """Give a worker the weights of a bucket as they are now."""
        self.streams.send_named(weights_name(index, head.number), rank, head, *self.holder.give(index))


_HANDLERS: dict[MessageKind, Handler] = {
    MessageKind.PUSH: "push",
    MessageKind.BUFFERS: "buffers",
    MessageKind.SKIP: "skip",
    MessageKind.BYE: "bye",
    MessageKind.SQUARES: "squares",
    MessageKind.STATE: "state",
    MessageKind.EXCHANGE: "exchange",
}
