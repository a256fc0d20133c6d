"""The center of easgd's workers, on a rank of its own, and a worker's way to it.

In: flat weights W of a worker, and a strength a: its learning rate times rho. Out: where the center was, for the worker
who is drawn to it; and the center moved, center <- center + a (W - center). Exchanges are taken one at a time: as they
come, or of all workers in turn (lecture 004, algorithm 1). A worker that has left or died loses its turn. Of buffers
the center takes the worker's share in a mean, one over the number of workers.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.program.program import Bucket, Program
from plait.program.serve.turns import Turns
from plait.run.interpret.averaging import tensors_of, views_of
from plait.run.interpret.state import ModelState
from plait.run.link.links import Handle
from plait.run.relaxed.wire import HEADER_BYTES, Head, Kind, Post, Streams, center_name
from plait.torch_private import foreach

_STRENGTH_BYTES = 8
"""Of the strength that goes with an exchange: a float64."""


class Center:
    """Serves exchanges; `state` is the model that it is the center of."""

    def __init__(self, plan: Plan, post: Post, state: ModelState, program: Program, start: int) -> None:
        self.plan, self.state, self.place = plan, state, 0
        self.streams = Streams(post)
        self.turns = Turns(plan.mesh.size, in_turn=plan.elastic.variant == "round-robin")
        self.applied = 0
        """Exchanges so far."""
        self.staleness: Counter[int] = Counter()
        """How many exchanges of others were taken since the worker's last one."""
        self.after_update: Callable[[], Iterator[None]] | None = None
        """Called after each exchange; may take its time."""
        self.is_gone: Callable[[int], bool] = lambda rank: False
        """Whether a rank has died."""
        self.on_work: Callable[[str, int], None] = lambda what, step: None
        """Called before and (empty) after a piece of work."""
        self.states: dict[tuple[int, int], Tensor] = {}
        """What other servers hold: there are none."""
        self.reached = start
        """The step after the last one of any worker."""
        self._start = start
        self._flats = program.of(plan.mesh.size).averages
        self._waiting: list[deque[tuple[Head, Tensor]]] = [deque() for _ in range(plan.mesh.size)]
        self._shares = [0] * plan.mesh.size
        self._seen = [0] * plan.mesh.size
        self._left: set[int] = set()

    @property
    def steps(self) -> int:
        """Steps of the job that are done: as many shares as there are workers make one."""
        return self._start + sum(self._shares) // self.plan.mesh.size

    def execute(self) -> Iterator[None]:
        """Serve until all workers have left."""
        while True:
            busy = self.poll()
            for rank, waiting in enumerate(self._waiting):
                while waiting and self.turns.may(rank):
                    self._exchange(rank, *waiting.popleft())
                    if self.after_update is not None:
                        yield from self.after_update()
                    busy = True
            if self.turns.all_gone and not any(self._waiting):
                return
            if not busy:
                for rank in range(self.plan.mesh.size):
                    if rank not in self._left and self.is_gone(rank):
                        self._waiting[rank].clear()
                        self._leave(rank)
                yield

    def poll(self) -> bool:
        """Take at most one message from everybody; whether there was any."""
        found = False
        for rank in range(self.plan.mesh.size):
            found = self.streams.take(rank, lambda head, m, rank=rank: self._take(rank, head, m)) or found  # type: ignore[misc]
        return found

    def _take(self, rank: int, head: Head, message: Tensor) -> None:
        match head.kind:
            case Kind.EXCHANGE:
                self._waiting[rank].append((head, message.clone()))
            case Kind.PULL:
                for index, bucket in enumerate(self._flats):
                    self.streams.send_named(
                        center_name(index, head.number), rank, head, *tensors_of(bucket, self.state)
                    )
            case Kind.BYE:
                self._shares[rank] = head.shares
                self.reached = max(self.reached, head.step)
                self._leave(rank)
            case _:
                raise AssertionError(f"easgd's center is sent no {head.kind.name}")

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        if not self._waiting[rank]:
            self.turns.leave(rank)

    @torch.no_grad()
    def _exchange(self, rank: int, head: Head, message: Tensor) -> None:
        self.on_work("exchange", head.step)
        bucket = self._flats[head.index]
        strength = float(message[:_STRENGTH_BYTES].view(torch.float64))
        theirs = message[_STRENGTH_BYTES:].view(bucket.dtype)
        own = tensors_of(bucket, self.state)
        self.streams.send_named(center_name(head.index, head.number), rank, head, *own)
        foreach.add_(own, foreach.sub(views_of(bucket, theirs), own), alpha=strength)
        if head.index == len(self._flats) - 1:
            self.staleness[self.applied - self._seen[rank]] += 1
            self.applied += 1
            self._seen[rank] = self.applied
            self._shares[rank] = head.shares
            self.reached = max(self.reached, head.step + 1)
            self.state.steps_done = self.steps
            self.turns.done(rank)
        if rank in self._left and not self._waiting[rank]:
            self.turns.leave(rank)
        self.on_work("", head.step)


class CenterPort:
    """The way of one worker to the center."""

    def __init__(
        self, plan: Plan, post: Post, state: ModelState, flats: Sequence[Bucket], *, waits: bool
    ) -> None:
        """`waits`: an answer may be waited for; else others must move meanwhile."""
        self.waits = waits
        self.received_bytes = 0
        self.shares = 0
        """Shares of steps that the worker has done; it counts them."""
        self._post = post
        self._streams = Streams(post)
        self._state = state
        self._flats = flats
        self._server = plan.mesh.size
        self._asked = -1
        self._own: list[Tensor] = []

    @property
    def sent_bytes(self) -> int:
        """Weights that were sent."""
        return self._streams.sent_bytes

    def exchange(self, index: int, flat: Tensor, strength: float, step: int) -> Handle:
        """Send weights; the handle has what the center was."""
        self._asked += 1
        head = Head(kind=Kind.EXCHANGE, index=index, step=step, number=self._asked, shares=self.shares)
        self._streams.send(self._server, head, torch.tensor([strength], dtype=torch.float64), flat.cpu())
        return _Answer(self, index, self._asked)

    def leave(self, step: int) -> None:
        """Tell that nothing more comes; `step` would have been the next."""
        self._streams.send(self._server, Head(kind=Kind.BYE, step=step, shares=self.shares))

    @torch.no_grad()
    def show(self, step: int) -> None:
        """Put the center into the model."""
        self._asked += 1
        self._streams.send(self._server, Head(kind=Kind.PULL, step=step, number=self._asked, counts=False))
        for index, bucket in enumerate(self._flats):
            found = _Answer(self, index, self._asked).result()
            tensors = tensors_of(bucket, self._state)
            self._own += [tensor.clone() for tensor in tensors]
            foreach.copy_(tensors, views_of(bucket, found))

    @torch.no_grad()
    def restore(self) -> None:
        """Put this worker's own weights back."""
        tensors = [tensor for bucket in self._flats for tensor in tensors_of(bucket, self._state)]
        foreach.copy_(tensors, self._own)
        self._own = []

    def take(self, index: int, number: int, use: Callable[[Tensor], None]) -> bool:
        """Have an answer used, where it is there."""
        return self._post.take(center_name(index, number), self._server, use)

    def wait(self, index: int, number: int, use: Callable[[Tensor], None]) -> None:
        """The same, once it is there."""
        self._post.wait(center_name(index, number), self._server, use)

    def read(self, index: int, message: Tensor) -> Tensor:
        """The weights in an answer, copied."""
        payload = message[HEADER_BYTES:]
        self.received_bytes += payload.numel()
        return payload.view(self._flats[index].dtype).to(self._state.device, copy=True)


class _Answer:
    """A center that is on its way."""

    def __init__(self, port: CenterPort, index: int, number: int) -> None:
        self._port, self._index, self._number = port, index, number
        self._found: Tensor | None = None

    def ready(self) -> bool:
        if self._found is None and not self._port.waits:
            self._port.take(self._index, self._number, self._put)
        return self._port.waits or self._found is not None

    def result(self) -> Tensor:
        if self._found is None:
            self._port.wait(self._index, self._number, self._put)
        assert self._found is not None
        return self._found

    def _put(self, message: Tensor) -> None:
        self._found = self._port.read(self._index, message)
