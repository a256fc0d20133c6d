"""A worker's way to the servers: gradients or weights out, weights in.

In: full buckets or flat weights, requests for weights. Out: messages to every server, and the model's parameters
written over with what came back, or where the center was. It never waits but where weights are needed.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.program.program import Bucket, RankProgram
from plait.run.hold.averaging import tensors_of, views_of
from plait.run.hold.state import ModelState
from plait.run.link.links import Handle
from plait.run.link.wire import (
    HEADER_BYTES,
    Head,
    MessageKind,
    Post,
    Streams,
    num_weights,
    part_of,
    saved_name,
    weights_name,
)
from plait.torch_private import foreach


class Port:
    """The way of one worker to all servers, or to the rank that has the center."""

    def __init__(self, plan: Plan, post: Post, state: ModelState, own: RankProgram, *, waits: bool) -> None:
        """`waits`: an answer may be waited for; else others must move meanwhile."""
        self.waits = waits
        self.shares = 0
        """Shares of steps that the worker has done; it counts them."""
        self.next_step = state.steps_done
        """The step after the last one of which the worker has had a share."""
        self._post = post
        self._streams = Streams(post)
        self._state = state
        self._has_center = plan.agreement.weights == "center"
        self._known = own.averages if self._has_center else own.buckets
        self._count = sum(bool(bucket.parameters) for bucket in self._known)
        self._servers = range(plan.mesh.size, plan.ranks)
        self._asked = -1
        self._fetched: set[int] = set()
        self._kept: list[Tensor] = []

    @property
    def sent_bytes(self) -> int:
        """Gradients, weights and buffers that were sent."""
        return self._streams.sent_bytes

    def push(self, index: int, bucket: Bucket, flat: Tensor, step: int) -> None:
        """Send every server its shard of a bucket; the scalars go to all."""
        assert bucket == self._known[index], "all steps of a run have the same buckets"
        scalars = flat[num_weights(bucket) :]
        for shard, server in enumerate(self._servers):
            start, end = part_of(bucket, shard, len(self._servers))
            self._streams.send(
                server, Head(kind=MessageKind.PUSH, index=index, step=step), flat[start:end], scalars
            )

    def push_buffers(self, tensors: Sequence[Tensor], step: int) -> None:
        """Send the first server the buffers."""
        self._streams.send(self._servers[0], Head(kind=MessageKind.BUFFERS, step=step), *tensors)

    def exchange(self, index: int, flat: Tensor, strength: float, step: int) -> Handle:
        """Send weights; the handle has what the center was."""
        self._asked += 1
        head = Head(kind=MessageKind.EXCHANGE, index=index, step=step, number=self._asked, shares=self.shares)
        self._streams.send(self._servers[0], head, torch.tensor([strength], dtype=torch.float64), flat.cpu())
        return _Answer(self, index, self._asked)

    def skip(self, step: int) -> None:
        """Tell that a step has nothing of this worker; a center does not wait for it."""
        if not self._has_center:
            for server in self._servers:
                self._streams.send(server, Head(kind=MessageKind.SKIP, step=step))

    def leave(self) -> None:
        """Tell that nothing more comes."""
        for server in self._servers:
            self._streams.send(server, Head(kind=MessageKind.BYE, step=self.next_step, shares=self.shares))

    def pause(self, step: int) -> None:
        """Tell that all that this worker took of the steps before `step` is sent, and wait until it is saved."""
        for server in self._servers:
            self._streams.send(server, Head(kind=MessageKind.PAUSE, step=step))
        for server in self._servers:
            self._post.wait(saved_name(step), server, lambda message: None)

    def pull(self, index: int, step: int) -> Handle:
        """Ask for the weights of a bucket; those of all buckets are asked for at once, and are of one moment."""
        if not self._fetched:
            self._ask(step, counts=True)
        self._fetched.add(index)
        if len(self._fetched) == self._count:
            self._fetched.clear()
        return _Pulled(self, index, self._asked)

    @torch.no_grad()
    def show(self) -> None:
        """Put what the servers have into the model, to be measured and not trained on."""
        self._ask(self.next_step, counts=False)
        for index, bucket in enumerate(self._known):
            if self._has_center:
                found = _Answer(self, index, self._asked).result()
                tensors = tensors_of(bucket, self._state)
                self._kept += [tensor.clone() for tensor in tensors]
                foreach.copy_(tensors, views_of(bucket, found))
            elif bucket.parameters:
                _Pulled(self, index, self._asked).result()

    @torch.no_grad()
    def restore(self) -> None:
        """Go on with what this worker trains: its own weights, or those that the next step pulls."""
        if self._kept:
            tensors = [tensor for bucket in self._known for tensor in tensors_of(bucket, self._state)]
            foreach.copy_(tensors, self._kept)
            self._kept = []

    def _ask(self, step: int, *, counts: bool) -> None:
        self._asked += 1
        for server in self._servers:
            head = Head(kind=MessageKind.PULL, step=step, number=self._asked, counts=counts)
            self._streams.send(server, head)

    def take(self, index: int, number: int, shard: int, use: Callable[[Tensor], None]) -> bool:
        """Where a server's shard of a bucket's weights is there: have it used."""
        return self._post.take(weights_name(index, number), self._servers[shard], use)

    def wait(self, index: int, number: int, shard: int, use: Callable[[Tensor], None]) -> None:
        """The same, once it is there."""
        self._post.wait(weights_name(index, number), self._servers[shard], use)

    def put(self, index: int, shard: int, message: Tensor) -> None:
        """Write a server's shard of a bucket's weights into the model."""
        bucket = self._known[index]
        begin, end = part_of(bucket, shard, len(self._servers))
        put_part(bucket, self._state.parameters, self._payload(index, message), begin, end)

    def read(self, index: int, message: Tensor) -> Tensor:
        """The weights in an answer, copied."""
        return self._payload(index, message).to(self._state.device, copy=True)

    def _payload(self, index: int, message: Tensor) -> Tensor:
        return message[HEADER_BYTES:].view(self._known[index].dtype)

    @property
    def shards(self) -> range:
        """Servers, by what shard of each bucket they hold."""
        return range(len(self._servers))


@torch.no_grad()
def put_part(bucket: Bucket, parameters: Mapping[str, Tensor], part: Tensor, begin: int, end: int) -> None:
    """Write the elements `begin` to `end` of a bucket's weights into its parameters."""
    start = 0
    for name, shape in zip(bucket.parameters, bucket.shapes, strict=True):
        count = prod(shape)
        low, high = max(begin, start), min(end, start + count)
        if low < high:
            piece, target = part[low - begin : high - begin], parameters[name].detach()
            if high - low == count:
                target.copy_(piece.view(shape))
            else:
                target.view(-1)[low - start : high - start].copy_(piece)
        start += count


class _Pulled:
    """Weights of one bucket that are on their way from every server into the model."""

    def __init__(self, port: Port, index: int, number: int) -> None:
        self._port, self._index, self._number = port, index, number
        self._missing = list(port.shards)

    def ready(self) -> bool:
        if not self._port.waits:
            self._missing = [
                shard
                for shard in self._missing
                if not self._port.take(self._index, self._number, shard, self._putting(shard))
            ]
        return self._port.waits or not self._missing

    def result(self) -> Tensor:
        for shard in self._missing:
            self._port.wait(self._index, self._number, shard, self._putting(shard))
        return torch.empty(0)

    def _putting(self, shard: int) -> Callable[[Tensor], None]:
        return lambda message: self._port.put(self._index, shard, message)


class _Answer:
    """A center that is on its way."""

    def __init__(self, port: Port, index: int, number: int) -> None:
        self._port, self._index, self._number = port, index, number
        self._found: Tensor | None = None

    def ready(self) -> bool:
        if self._found is None and not self._port.waits:
            self._port.take(self._index, self._number, 0, self._put)
        return self._port.waits or self._found is not None

    def result(self) -> Tensor:
        if self._found is None:
            self._port.wait(self._index, self._number, 0, self._put)
        assert self._found is not None
        return self._found

    def _put(self, message: Tensor) -> None:
        self._found = self._port.read(self._index, message)
