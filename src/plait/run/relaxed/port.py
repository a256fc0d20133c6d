"""A worker's side of the servers: gradients out, weights in.

In: full buckets, requests for weights. Out: messages to every server, and the model's parameters written over with what
came back. It never waits but where weights are needed.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from plait.plan.plan import Plan
from plait.program.program import Bucket
from plait.run.interpret.state import ModelState
from plait.run.link.links import Handle
from plait.run.relaxed.wire import HEADER_BYTES, Head, Kind, Post, Streams, num_weights, part_of, weights_name


class Port:
    """The way of one worker to all servers."""

    def __init__(
        self, plan: Plan, post: Post, state: ModelState, buckets: Sequence[Bucket], *, waits: bool
    ) -> None:
        """`waits`: a pull may block until it is answered; else others must move meanwhile."""
        self.waits = waits
        self.received_bytes = 0
        self._post = post
        self._streams = Streams(post)
        self._state = state
        self._known = buckets
        self._count = sum(bool(bucket.parameters) for bucket in buckets)
        self._servers = range(plan.mesh.size, plan.ranks)
        self._asked = -1
        self._fetched: set[int] = set()

    @property
    def sent_bytes(self) -> int:
        """Gradients and buffers that were sent."""
        return self._streams.sent_bytes

    def push(self, index: int, bucket: Bucket, flat: Tensor, step: int) -> None:
        """Send every server its part of a bucket; the scalars go to all."""
        assert bucket == self._known[index], "all steps of a run have the same buckets"
        scalars = flat[num_weights(bucket) :]
        for place, server in enumerate(self._servers):
            start, end = part_of(bucket, place, len(self._servers))
            self._streams.send(server, Head(kind=Kind.PUSH, index=index, step=step), flat[start:end], scalars)

    def push_buffers(self, tensors: Sequence[Tensor], step: int) -> None:
        """Send the first server the buffers."""
        self._streams.send(self._servers[0], Head(kind=Kind.BUFFERS, step=step), *tensors)

    def skip(self, step: int) -> None:
        """Tell that a step has nothing of this worker."""
        for server in self._servers:
            self._streams.send(server, Head(kind=Kind.SKIP, step=step))

    def leave(self, step: int) -> None:
        """Tell that nothing more comes; `step` would have been the next."""
        for server in self._servers:
            self._streams.send(server, Head(kind=Kind.BYE, step=step))

    def pull(self, index: int, step: int) -> Handle:
        """Ask for the weights of a bucket; those of all buckets are asked for at once, and are of one moment."""
        if not self._fetched:
            self._ask(step, counts=True)
        self._fetched.add(index)
        if len(self._fetched) == self._count:
            self._fetched.clear()
        return _Pulled(self, index, self._asked)

    def refresh(self, step: int) -> None:
        """Fetch all weights as they are before a step, to be measured and not trained on."""
        self._ask(step, counts=False)
        for index, bucket in enumerate(self._known):
            if bucket.parameters:
                _Pulled(self, index, self._asked).result()

    def _ask(self, step: int, *, counts: bool) -> None:
        self._asked += 1
        for server in self._servers:
            head = Head(kind=Kind.PULL, step=step, number=self._asked, counts=counts)
            self._streams.send(server, head)

    def take(self, index: int, number: int, place: int) -> bool:
        """Where a server's part of a bucket's weights is there: put it into the model."""
        return self._post.take(
            weights_name(index, number), self._servers[place], lambda m: self._put(index, place, m)
        )

    def wait(self, index: int, number: int, place: int) -> None:
        """The same, once it is there."""
        self._post.wait(
            weights_name(index, number), self._servers[place], lambda m: self._put(index, place, m)
        )

    def _put(self, index: int, place: int, message: Tensor) -> None:
        bucket = self._known[index]
        begin, end = part_of(bucket, place, len(self._servers))
        payload = message[HEADER_BYTES:]
        self.received_bytes += payload.numel()
        part = payload.view(bucket.dtype)
        put_part(bucket, self._state.parameters, part, begin, end)

    @property
    def places(self) -> range:
        """Servers, by their place among servers."""
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
    """Weights of one bucket that are on their way from every server."""

    def __init__(self, port: Port, index: int, number: int) -> None:
        self._port, self._index, self._number = port, index, number
        self._missing = list(port.places)

    def ready(self) -> bool:
        if not self._port.waits:
            self._missing = [
                place for place in self._missing if not self._port.take(self._index, self._number, place)
            ]
        return self._port.waits or not self._missing

    def result(self) -> Tensor:
        for place in self._missing:
            self._port.wait(self._index, self._number, place)
        return torch.empty(0)
