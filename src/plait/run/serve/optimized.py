"""Weights on a server that its optimizer updates, by gradients that workers push.

In: contributions of workers: buckets with their scalars, and buffers. Out: optimizer steps on this server's shard of
the weights. Several servers clip by the norm over all of them: each tells the others the squares of its shard.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.job.updates.clip import Clip
from plait.plan.plan import DATA
from plait.program.program import Bucket
from plait.program.serve.rule import Due
from plait.run.hold.gradients import GradientStore
from plait.run.hold.server_shards import group_of
from plait.run.link.links import NoLinks
from plait.run.link.wire import Head, MessageKind
from plait.run.serve.service import Contribution, Service


class Optimized:
    """A `Holder` of weights and an optimizer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._servers, self._shard = service.plan.sync.servers, service.shard
        job = service.state.job
        self._clip = Clip.of(job.clip_norm, job.clip_value)
        self._buckets = service.own.buckets
        self._own_buckets = [_own_bucket(b, self._servers) for b in self._buckets if b.parameters]
        self._squares: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._each_step = service.serve.order == "step"
        self.num_parts = len(self._buckets) + (1 if service.serve.buffers and service.shard == 0 else 0)
        self.store = GradientStore(service.state, NoLinks())
        self.norm: Tensor | None = None
        """Of the last update, where it was computed."""

    def steps(self) -> int:
        """Steps of the job that are in the weights."""
        return self._service.rule.steps

    def give(self, index: int) -> Sequence[Tensor]:
        """This server's shard of the weights of a bucket."""
        return [self._service.state.parameters[name] for name in self._buckets[index].parameters]

    def completed(self, worker: int) -> None:
        """A worker's gradients are there."""
        if self._clips_together and not self._each_step:
            sender = self._service.workers[worker]
            self._tell_squares((worker, sender.number), [sender.pushed[-1]])

    @property
    def _clips_together(self) -> bool:
        """Whether the norm of gradients needs the other servers."""
        return bool(self._clip.norms) and self._servers > 1

    def is_ready(self, due: Due) -> bool:
        """Whether all servers have told the squares of the update, where it needs them."""
        if not self._clips_together:
            return True
        key, workers = self._key(due), self._service.workers
        if self._each_step and self._shard not in self._squares.get(key, {}):
            self._tell_squares(key, [workers[w].pushed[0] for w in due.workers])
        if len(self._squares[key]) == self._servers:
            return True
        worker = workers[due.workers[0]]
        if not self._each_step and worker.left and self._service.is_gone(due.workers[0]):
            self._service.rule.drop()  # it died between one server and the next
            self._squares.pop(key)
            worker.pushed.popleft()
        return False

    def _key(self, due: Due) -> tuple[int, int]:
        if self._each_step:
            return -1, due.step
        worker = self._service.workers[due.workers[0]]
        return due.workers[0], worker.number - len(worker.pushed) + 1

    def _tell_squares(self, key: tuple[int, int], pushed: Sequence[Contribution]) -> None:
        """Compute the squares of this server's shard of an update, and send them to the others."""
        squares = torch.zeros(len(self._clip.norms), dtype=torch.float64)
        frozen = self._service.state.frozen(key[1]) if self._each_step else frozenset()
        own_buckets = iter(self._own_buckets)
        for index, bucket in enumerate(self._buckets):
            group = next(own_buckets).group if bucket.parameters else None
            total = self._sum(index, pushed)
            if total is None or group is None:
                continue
            own = group.chunk_views(total[: total.numel() - len(bucket.scalars)], self._shard)
            for name, part in zip(bucket.parameters, own, strict=True):
                if name not in frozen and (bound := self._clip.norm_of(name)) is not None:
                    squares[bound] += torch.linalg.vector_norm(part).double().square()
        self._squares.setdefault(key, {})[self._shard] = squares
        first = self._service.plan.mesh.size
        for shard in range(self._servers):
            if shard != self._shard:
                head = Head(kind=MessageKind.SQUARES, index=key[0], number=key[1])
                self._service.streams.send(first + shard, head, squares)

    def take(self, shard: int, head: Head, message: Tensor) -> None:
        """The squares of another server's shard."""
        squares = message.view(torch.float64).clone()
        self._squares.setdefault((head.index, head.number), {})[shard] = squares

    def _sum(self, index: int, pushed: Sequence[Contribution]) -> Tensor | None:
        """The sum of a bucket over workers, in their order; None where nobody had samples."""
        dtype = self._buckets[index].dtype
        parts = [entry[index][1].view(dtype) for entry in pushed if index in entry]
        if not parts:
            return None
        total = parts[0].clone() if len(parts) > 1 else parts[0]
        for part in parts[1:]:
            total.add_(part)
        return total

    def apply(self, due: Due, pushed: Sequence[Contribution]) -> None:
        """One optimizer step."""
        squares = None
        if self._clips_together:
            worker = self._service.workers[due.workers[0]]
            key = (-1, due.step) if self._each_step else (due.workers[0], worker.number - len(worker.pushed))
            parts = self._squares.pop(key)
            squares = torch.stack([parts[shard] for shard in sorted(parts)]).sum(0)
        if any(pushed):
            self._update(due.step, pushed, squares)

    def _update(self, step: int, pushed: Sequence[Contribution], squares: Tensor | None) -> None:
        state, weight = self._service.state, None
        own = iter(self._own_buckets)
        for index, bucket in enumerate(self._buckets):
            total = self._sum(index, pushed)
            assert total is not None
            count = total.numel() - len(bucket.scalars)
            weight = dict(zip(bucket.scalars, total[count:], strict=True)).get("weight", weight)
            if bucket.parameters:
                self.store.take(next(own), total[:count])
        self.store.frozen = state.frozen(step)
        self.norm = self.store.finish(
            self._own_buckets,
            late_weight=weight,
            clip=self._clip,
            squares=squares.to(state.dtype) if squares is not None else None,
        )
        self.store.hand_over(self._own_buckets)
        state.update(step)
        buffers = [entry[-1][1] for entry in pushed if -1 in entry]
        if buffers:
            self._put_buffers(buffers[0])
        if state.averages is not None:
            state.averages.after(step)

    def _put_buffers(self, message: Tensor) -> None:
        start = 0
        for name in self._service.serve.buffers:
            buffer = self._service.state.buffers[name]
            size = buffer.numel() * buffer.element_size()
            value = torch.empty_like(buffer, memory_format=torch.contiguous_format)
            value.view(-1).view(torch.uint8).copy_(message[start : start + size])
            buffer.copy_(value)
            start += size


def _own_bucket(bucket: Bucket, servers: int) -> Bucket:
    """A bucket as a server's optimizer sees it: without scalars, and cut where there are several servers."""
    if servers == 1:
        return replace(bucket, scalars=(), axis=DATA)
    return replace(bucket, scalars=(), axis=DATA, group=group_of(bucket, servers))
