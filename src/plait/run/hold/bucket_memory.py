"""The memory in which buckets of gradients travel: one flat tensor each.

In: buckets. Out: flat tensors, and the views of gradients and scalars in them. Buckets of which a rank keeps a shard
borrow memory from each other where ZeRO cuts gradients too, and give it back once the shard is kept.
"""

import torch
from torch import Tensor

from plait.plan.plan import DATA
from plait.program.program import Bucket
from plait.run.hold.state import ModelState
from plait.run.link.links import Links


class BucketMemory:
    """Flat memory of the buckets of one rank."""

    def __init__(self, state: ModelState, links: Links) -> None:
        self._state, self._links = state, links
        self._flat: dict[Bucket, Tensor] = {}
        self.views: dict[Bucket, list[Tensor]] = {}
        """Gradients and buffers of each bucket: in its flat tensor, or as they came where it does not travel."""
        self.scalars: dict[Bucket, list[Tensor]] = {}
        """Scalars that travel at its end."""
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._borrowed: dict[Bucket, Tensor] = {}

    @property
    def is_pooled(self) -> bool:
        """Whether whole gradients are held for a moment alone: memory is then lent from bucket to bucket."""
        holding = self._state.holding
        return holding is not None and holding.layout.zero >= 2

    def flat(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients and scalars as one tensor."""
        if bucket not in self._flat:
            if bucket.group is not None:
                self._flat[bucket] = flat = self._room(bucket)
                self.views[bucket] = bucket.group.views(flat)
                self.scalars[bucket] = []
                return flat
            flat = (
                self._links.buffer(bucket.num_elements, bucket.dtype, self._state.device, bucket.axis)
                if bucket.axis is not None
                else torch.zeros(bucket.num_elements, dtype=bucket.dtype, device=self._state.device)
            )
            sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
            pieces = torch.split(flat, [*sizes, *([1] * len(bucket.scalars))])
            self._flat[bucket] = flat
            self.views[bucket] = [p.view(s) for p, s in zip(pieces, bucket.shapes, strict=False)]
            self.scalars[bucket] = [piece.view(()) for piece in pieces[len(bucket.shapes) :]]
        return self._flat[bucket]

    def own_shard(self, bucket: Bucket) -> Tensor:
        """This rank's shard of a flat group, in the memory in which the group travels."""
        holding = self._state.holding
        assert holding is not None and bucket.group is not None
        size = bucket.group.chunk_elements
        return self._flat[bucket][holding.data_coordinate * size :][:size]

    def give_back(self, bucket: Bucket) -> None:
        """What the bucket has borrowed may be lent to another."""
        self._spare[bucket.dtype].append(self._borrowed.pop(bucket))
        self._flat.pop(bucket)
        self.views.pop(bucket)

    def pointers(self) -> set[int]:
        """The memory of gradients that are kept as they came."""
        loose = [views for bucket, views in self.views.items() if bucket not in self._flat]
        return {t.untyped_storage().data_ptr() for views in loose for t in views if not t.is_sparse}

    def _room(self, bucket: Bucket) -> Tensor:
        """Memory for a bucket of which this rank will keep a part: its own, or borrowed until then."""
        if not self.is_pooled:
            return self._links.buffer(bucket.num_elements, bucket.dtype, self._state.device, DATA)
        spare = self._spare.setdefault(bucket.dtype, [])
        fits = [room for room in spare if room.numel() >= bucket.num_elements]
        if fits:
            room = min(fits, key=Tensor.numel)
            spare[:] = [other for other in spare if other is not room]
        else:
            holding = self._state.holding
            assert holding is not None
            largest = max(group.num_elements for group in holding.layout.groups)
            room = self._links.buffer(largest, bucket.dtype, self._state.device, DATA)
        self._borrowed[bucket] = room
        return room[: bucket.num_elements]
