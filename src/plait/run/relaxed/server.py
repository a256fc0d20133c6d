"""A server: holds weights and the optimizer, takes gradients, gives weights, one message at a time.

In: messages of workers and of other servers. Out: updates of its part of the weights, and answers. When an update is
applied and a request answered is the rule's decision. `execute` is a generator that yields while there is nothing to
do, so that all of a run's servers and workers can share one process; it never waits for anybody.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from plait.plan.plan import DATA, Plan
from plait.program.instructions import Serve
from plait.program.program import Bucket, Program
from plait.program.serve.rule import Due, Rule
from plait.run.interpret.gradients import GradientStore
from plait.run.interpret.state import ModelState
from plait.run.link.links import NoLinks
from plait.run.relaxed.parts import group_of
from plait.run.relaxed.wire import Head, Kind, Post, Streams, weights_name


@dataclass(slots=True)
class _Worker:
    """What a server knows of a worker."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    """Of the step that is being pushed: its buckets, and buffers as -1."""
    pushed: deque[dict[int, Tensor]] = field(default_factory=deque)
    """Steps that are complete and not yet applied; empty where the worker had no samples."""
    number: int = 0
    """Steps that were complete so far."""
    asks: deque[Head] = field(default_factory=deque)
    """Requests that were not answered yet."""
    left: bool = False


class Server:
    """One of a run's servers."""

    def __init__(
        self,
        plan: Plan,
        place: int,
        post: Post,
        state: ModelState,
        program: Program,
        rule: Rule,
        *,
        clip_norm: float | None,
    ) -> None:
        self.plan, self.place, self.state, self.rule = plan, place, state, rule
        self.streams = Streams(post)
        self.store = GradientStore(state, NoLinks())
        self.norm: Tensor | None = None
        """Of the last update, where it was computed."""
        self.total: Tensor | None = None
        """Of the last update: the sum of its workers' totals."""
        self.after_update: Callable[[], Iterator[None]] | None = None
        """Called after each update; may take its time."""
        self.states: dict[tuple[int, int], Tensor] = {}
        """What other servers hold, by (place, step): for a checkpoint."""
        self.reached = 0
        """The step after the last one of any worker."""
        self.is_gone: Callable[[int], bool] = lambda rank: False
        """Whether a rank has died."""
        self.on_work: Callable[[str, int], None] = lambda what, step: None
        """Called before and (empty) after a piece of work."""
        (serve,) = program.of(plan.mesh.size).instructions
        assert isinstance(serve, Serve)
        self._serve = serve
        self._buckets = program.buckets
        self._own_buckets = [own_bucket(b, plan.sync.servers) for b in self._buckets if b.parameters]
        self._clip_norm = clip_norm
        self._workers = [_Worker() for _ in range(plan.mesh.size)]
        self._squares: dict[tuple[int, int], dict[int, Tensor]] = {}

    def execute(self) -> Iterator[None]:
        """Serve until all workers have left and nothing is to be done."""
        while True:
            busy = self.poll()
            while (due := self.rule.due()) is not None and self._is_ready(due):
                self._apply(due)
                if self.after_update is not None:
                    yield from self.after_update()
                busy = True
            busy = self._answer() or busy
            if all(worker.left for worker in self._workers) and self.rule.due() is None:
                return
            if not busy:
                self._look_for_the_dead()
                yield

    def poll(self) -> bool:
        """Take at most one message from everybody; whether there was any."""
        found = False
        for rank in range(self.plan.ranks):
            if rank != self.plan.mesh.size + self.place:
                found = self.streams.take(rank, lambda head, m, rank=rank: self._take(rank, head, m)) or found  # type: ignore[misc]
        return found

    def _take(self, rank: int, head: Head, message: Tensor) -> None:
        self.on_work(head.kind.name.lower(), head.step)
        place = rank - self.plan.mesh.size
        match head.kind:
            case Kind.SQUARES:
                self._note_squares((head.index, head.number), place, message.view(torch.float64).clone()[0])
            case Kind.STATE:
                self.states[place, head.step] = message.clone()
            case Kind.PULL:
                self._workers[rank].asks.append(head)
            case Kind.BYE:
                self.reached = max(self.reached, head.step)
                self._leave(rank)
            case Kind.SKIP:
                self._workers[rank].pushed.append({})
                self._complete(rank, head.step)
            case Kind.PUSH | Kind.BUFFERS:
                self._collect(rank, head, message)
        self.on_work("", head.step)

    def _collect(self, rank: int, head: Head, message: Tensor) -> None:
        """Part of a worker's step; the last one makes it complete."""
        worker = self._workers[rank]
        index = -1 if head.kind is Kind.BUFFERS else head.index
        worker.parts[index] = (
            message.clone() if index < 0 else message.view(self._buckets[index].dtype).clone()
        )
        wanted = len(self._buckets) + (1 if self._serve.buffers and self.place == 0 else 0)
        if len(worker.parts) == wanted:
            worker.pushed.append(worker.parts)
            worker.parts = {}
            self._complete(rank, head.step)

    def _complete(self, rank: int, step: int) -> None:
        worker = self._workers[rank]
        worker.number += 1
        self.rule.push(rank, step)
        if self._clips_together and not self._is_clocked:
            self._tell_squares((rank, worker.number), [worker.pushed[-1]])

    def _leave(self, rank: int) -> None:
        self._workers[rank].left = True
        self.rule.leave(rank)

    def _look_for_the_dead(self) -> None:
        for rank, worker in enumerate(self._workers):
            if not worker.left and self.is_gone(rank):
                worker.asks.clear()
                self._leave(rank)

    @property
    def _is_clocked(self) -> bool:
        return self.plan.sync.rule != "server-async"

    @property
    def _clips_together(self) -> bool:
        """Whether the norm of gradients needs the other servers."""
        return self._clip_norm is not None and self.plan.sync.servers > 1

    def _is_ready(self, due: Due) -> bool:
        if not self._clips_together:
            return True
        key = self._key(due)
        if self._is_clocked and self.place not in self._squares.get(key, {}):
            self._tell_squares(key, [self._workers[w].pushed[0] for w in due.workers])
        if len(self._squares[key]) == self.plan.sync.servers:
            return True
        worker = self._workers[due.workers[0]]
        if not self._is_clocked and worker.left and self.is_gone(due.workers[0]):
            self.rule.drop()  # it died between one server and the next
            self._squares.pop(key)
            worker.pushed.popleft()
        return False

    def _key(self, due: Due) -> tuple[int, int]:
        if self._is_clocked:
            return -1, due.step
        worker = self._workers[due.workers[0]]
        return due.workers[0], worker.number - len(worker.pushed) + 1

    def _tell_squares(self, key: tuple[int, int], pushed: Sequence[dict[int, Tensor]]) -> None:
        """Compute the squares of this server's part of an update, and send them to the others."""
        squares = torch.zeros((), dtype=torch.float64)
        for index, bucket in enumerate(self._buckets):
            total = self._sum(index, pushed)
            if total is not None:
                own = total[: total.numel() - len(bucket.scalars)]
                squares += torch.linalg.vector_norm(own).double().square()
        self._note_squares(key, self.place, squares)
        first = self.plan.mesh.size
        for place in range(self.plan.sync.servers):
            if place != self.place:
                head = Head(kind=Kind.SQUARES, index=key[0], number=key[1])
                self.streams.send(first + place, head, squares)

    def _note_squares(self, key: tuple[int, int], place: int, squares: Tensor) -> None:
        self._squares.setdefault(key, {})[place] = squares

    def _sum(self, index: int, pushed: Sequence[dict[int, Tensor]]) -> Tensor | None:
        """The sum of a bucket over workers, in their order; None where nobody had samples."""
        parts = [entry[index] for entry in pushed if index in entry]
        if not parts:
            return None
        total = parts[0].clone() if len(parts) > 1 else parts[0]
        for part in parts[1:]:
            total.add_(part)
        return total

    @torch.no_grad()
    def _apply(self, due: Due) -> None:
        """One optimizer step."""
        self.on_work("update", due.step)
        key = self._key(due) if self._clips_together else None
        pushed = [self._workers[worker].pushed.popleft() for worker in due.workers]
        parts = self._squares.pop(key) if key is not None else {}
        squares = torch.stack([parts[place] for place in sorted(parts)]).sum() if parts else None
        if any(pushed):
            self._update(due.step, pushed, squares)
        self.rule.done()
        self.state.steps_done = self.rule.steps
        self.on_work("", due.step)

    def _update(self, step: int, pushed: Sequence[dict[int, Tensor]], squares: Tensor | None) -> None:
        weight: Tensor | None = None
        own = iter(self._own_buckets)
        for index, bucket in enumerate(self._buckets):
            total = self._sum(index, pushed)
            assert total is not None
            scalars = dict(zip(bucket.scalars, total[total.numel() - len(bucket.scalars) :], strict=True))
            self.total, weight = scalars.get("total", self.total), scalars.get("weight", weight)
            if bucket.parameters:
                self.store.take(next(own), total[: total.numel() - len(bucket.scalars)])
        self.norm = self.store.finish(
            self._own_buckets,
            late_weight=weight,
            clip_norm=self._clip_norm,
            squares=squares.to(self.state.dtype) if squares is not None else None,
        )
        self.state.schedule.apply(self.state.optimizer, step)
        self.store.hand_over(self._own_buckets)
        self.state.optimizer.step()
        buffers = [entry[-1] for entry in pushed if -1 in entry]
        if buffers:
            self._put_buffers(buffers[0])

    def _put_buffers(self, message: Tensor) -> None:
        start = 0
        for name in self._serve.buffers:
            buffer = self.state.buffers[name]
            size = buffer.numel() * buffer.element_size()
            value = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            value.view(-1).view(torch.uint8).copy_(message[start : start + size])
            buffer.copy_(value)
            start += size

    def _answer(self) -> bool:
        """Give weights to those whose request may be answered; whether there was any."""
        found = False
        for rank, worker in enumerate(self._workers):
            while worker.asks and self.rule.may_pull(rank, worker.asks[0].step):
                head = worker.asks.popleft()
                self.on_work("pull", head.step)
                if head.counts:
                    self.rule.pulled(rank, head.step)
                self._give(rank, head)
                self.on_work("", head.step)
                found = True
        return found

    def _give(self, rank: int, head: Head) -> None:
        for index in self._serve.order:
            tensors = [self.state.parameters[name] for name in self._buckets[index].parameters]
            self.streams.send_named(weights_name(index, head.number), rank, head, *tensors)


def own_bucket(bucket: Bucket, servers: int) -> Bucket:
    """A bucket as a server's optimizer sees it: without scalars, and cut where there are several servers."""
    if servers == 1:
        return replace(bucket, scalars=(), axis=DATA)
    return replace(bucket, scalars=(), axis=DATA, group=group_of(bucket, servers))
