"""A server on clocks: a queue that handles one message after the other, under the same rule as a real one.

In: messages of workers, in the order in which they arrive. Out: when answers are there, and spans by handler, as a
real server's trace has them.
"""

from collections import deque
from dataclasses import dataclass, field

from plait.program.instructions import (
    Exchange,
    Handler,
    Instruction,
    Leave,
    Pull,
    Push,
    PushBuffers,
    Serve,
)
from plait.program.program import RankProgram
from plait.program.serve.rule import rule_of
from plait.program.simulate.event_clock import Clock, Key, Turn
from plait.trace.span import Span

_HANDLERS: dict[type, Handler] = {
    Push: "push",
    PushBuffers: "buffers",
    Exchange: "exchange",
    Pull: "pull",
    Serve: "update",
}


def handler_of(instruction: Instruction) -> Handler:
    """What a server is busy with where it handles what a worker's instruction has sent."""
    return _HANDLERS[type(instruction)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What a worker sends to a server."""

    worker: int
    step: int
    sent_s: float
    instruction: Instruction
    number: int
    """Of a pull or an exchange: how many the worker has sent before."""


@dataclass(slots=True)
class Queue:
    """What has arrived at a server."""

    rank: int
    messages: deque[Message] = field(default_factory=deque)
    arrived: int = 0

    def take(self, clock: Clock, message: Message) -> None:
        """A message arrives."""
        self.messages.append(message)
        self.arrived += 1
        clock.happen((self.rank, "message", self.arrived), message.sent_s)

    def weights(self, worker: int, bucket: int, number: int) -> Key:
        """That the weights of a bucket are there, of a worker's pull."""
        return self.rank, "weights", worker, bucket, number

    def center(self, worker: int, number: int) -> Key:
        """That a worker knows where the center was, of its exchange."""
        return self.rank, "center", worker, number


def serving(clock: Clock, queue: Queue, serve: Serve, worker: RankProgram, workers: int) -> Turn:
    """Be a server until all workers, who do what `worker` says, have left."""
    rank, rule = queue.rank, rule_of(serve, workers, 0)
    pulls = {i.bucket: i for i in worker.instructions if isinstance(i, Pull)}
    wanted = len(worker.buckets) if "push" in serve.handlers else len(worker.averages)
    wanted += 1 if serve.buffers and rank == workers else 0
    parts: list[list[Message]] = [[] for _ in range(workers)]
    complete: list[deque[list[Message]]] = [deque() for _ in range(workers)]
    asks: list[Message] = []
    left = handled = 0
    while left < workers or queue.messages:
        if not queue.messages:
            yield (rank, "message", handled + 1)
        handled += 1
        message = queue.messages.popleft()
        clock.now_s[rank] = max(clock.now_s[rank], message.sent_s)
        if isinstance(message.instruction, Leave):
            left += 1
            rule.leave(message.worker)
        elif isinstance(message.instruction, Pull):
            asks.append(message)
        else:
            yield from _work(clock, rank, message.step, serve, message.instruction)
            parts[message.worker].append(message)
            if len(parts[message.worker]) == wanted:
                complete[message.worker].append(parts[message.worker])
                parts[message.worker] = []
                rule.push(message.worker, message.step)
        new = asks[-1:] if isinstance(message.instruction, Pull) else []
        while (due := rule.due()) is not None:
            new = asks  # an update may be what they wait for
            yield from _work(clock, rank, due.step, serve, serve)
            rule.done()
            for at in due.workers:
                for sent in complete[at].popleft():
                    clock.happen(queue.center(at, sent.number), clock.now_s[rank])
        for ask in [a for a in new if rule.may_pull(a.worker, a.step)]:
            asks.remove(ask)
            rule.pulled(ask.worker, ask.step)
            for bucket in serve.gives:
                yield from _work(clock, rank, ask.step, serve, pulls[bucket])
                clock.happen(queue.weights(ask.worker, bucket, ask.number), clock.now_s[rank])


def _work(clock: Clock, rank: int, step: int, serve: Serve, instruction: Instruction) -> Turn:
    """Be busy with what a worker has sent, or with an update."""
    start_s, handler = clock.now_s[rank], handler_of(instruction)
    yield from clock.busy(rank, clock.duration(rank, instruction))
    clock.spans.append(
        Span(
            rank=rank,
            step=step,
            instruction=serve.work(handler),
            kind="update" if handler == "update" else "communication",
            name=handler,
            lane="compute",
            start_s=start_s,
            end_s=clock.now_s[rank],
            num_bytes=instruction.num_bytes,
        )
    )
