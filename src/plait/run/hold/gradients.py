"""The gradients of one rank between backward and update.

In: gradients as the backward makes them. Out: summed, divided, clipped gradients on the user's parameters. Buckets that
travel are one flat tensor each; gradients that stay are kept as they came.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.graph.ops.choice import is_absent
from plait.job.updates.clip import Clip
from plait.program.program import Bucket
from plait.run.hold.away.gone import Gone
from plait.run.hold.bounds import by_norm, clamp, entries, norms_of
from plait.run.hold.bucket_memory import BucketMemory
from plait.run.hold.lying import lying_as
from plait.run.hold.sparse import to_dense, to_sparse
from plait.run.hold.state import ModelState
from plait.run.link.links import Links
from plait.torch_private import foreach


class GradientStore:
    """Holds what `Accumulate` fills and `Update` uses."""

    def __init__(self, state: ModelState, links: Links) -> None:
        self._state = state
        self._memory = BucketMemory(state, links)
        self._loose: list[Tensor] = []
        self._copies: dict[Bucket, list[bool]] = {}
        self._kept: dict[Bucket, Tensor] = {}
        self.frozen: frozenset[str] = frozenset()
        """Parameters that are not trained in this step: their gradients count as if there were none."""
        self.conditional: frozenset[str] = frozenset()
        """Parameters that a step may not have used: their gradients say so (`is_absent`)."""
        self._sparse: dict[str, int] = {}
        """Dims that number the rows of gradients that came sparse: they travel dense; optimizers get sparse ones."""
        self._gone = Gone()
        self._handed: set[str] = set()
        self.on_ready: Callable[[dict[str, Tensor]], None] | None = None
        """Called with all gradients of a step, by parameter name: for verification."""
        self._ready: dict[str, Tensor] = {}
        """What it is going to be called with, where there are several updates."""

    def flat(self, bucket: Bucket) -> Tensor:
        """The bucket's gradients and scalars as one tensor."""
        return self._memory.flat(bucket)

    def whole_or_kept(self, bucket: Bucket) -> Tensor:
        """This rank's part of a bucket of which other stages have parts as well, as one flat tensor."""
        if bucket.group is not None:
            return self._kept[bucket]
        return self.flat(bucket)

    def keep(self, bucket: Bucket, part: Tensor, *, fresh: bool) -> None:
        """This rank's part of the sum; the memory in which the bucket travelled is given back."""
        assert bucket.group is not None
        if not self._memory.is_pooled:
            own = self._memory.own_shard(bucket)
            self._kept[bucket] = own if own.data_ptr() == part.data_ptr() else own.copy_(part)
            return
        if not fresh:
            self._kept[bucket].add_(part)
        elif bucket in self._kept:
            self._kept[bucket].copy_(part)
        else:
            self._kept[bucket] = part.clone()
        self._memory.give_back(bucket)

    def take(self, bucket: Bucket, summed: Tensor) -> None:
        """This rank's shard of a bucket, or all of it, that was summed elsewhere."""
        if bucket.group is not None:
            self._kept[bucket] = summed
        else:
            self.flat(bucket).copy_(summed)

    def squares(self, buckets: Sequence[Bucket], axes: Sequence[str], clip: Clip) -> Tensor:
        """The squares of this rank's gradients, for each norm of `clip`; each part of a gradient is counted on one rank
        of `axes` alone."""
        holding = self._state.holding
        assert holding is not None
        here, gone = (
            by_norm(clip, {n: t for n, t in of.items() if holding.layout.is_counted(n, holding.rank, axes)})
            for of in (self.gradients(self._here(buckets)), self._gone.norms)
        )
        found = torch.zeros(len(clip.norms), dtype=self._state.dtype, device=self._state.device)
        for position in sorted({*here, *gone}):
            norms = [*norms_of(here.get(position, [])), *gone.get(position, ())]
            found[position] = torch.stack(norms).square().sum()
        return found

    def note_norms(self, buckets: Sequence[Bucket]) -> None:
        """Keep the norms of gradients that are about to leave."""
        self._coalesce(buckets)
        own = {n: g for b in buckets for n, g in self.summed(b).items() if n not in self.frozen}
        self._gone.norms |= dict(zip(own, norms_of(list(own.values())), strict=True))

    def summed(self, bucket: Bucket) -> dict[str, Tensor]:
        """What this rank has of the gradients of a bucket, by parameter."""
        return dict(zip(bucket.parameters, self._parts(bucket), strict=True))

    def leave(self, bucket: Bucket, there: dict[str, Tensor]) -> None:
        """Gradients of a bucket are on the host now; sparse ones, which are no parts of `there`, follow."""
        own = self.summed(bucket)
        self._gone.leave(bucket, {n: there[n] if n in there else g.cpu() for n, g in own.items()})
        if bucket.axis is None and not bucket.tied:
            self._memory.views.pop(bucket, None)
        if bucket.group is not None and self._memory.is_pooled:
            self._kept.pop(bucket, None)

    def _here(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        return [bucket for bucket in buckets if bucket not in self._gone.gradients]

    def slot(self, bucket: Bucket, position: int) -> Tensor:
        """The memory of one gradient of a bucket that travels: whoever makes the gradient may write it here."""
        self.flat(bucket)
        return self._memory.views[bucket][position]

    def add(self, bucket: Bucket, tensors: list[Tensor], *, fresh: bool, begins: bool) -> None:
        """Gradients, then the bucket's scalars, then scalars that no bucket carries; `begins`: the first of a step."""
        count = len(bucket.shapes)
        gradients, scalars = tensors[:count], tensors[count : count + len(bucket.scalars)]
        loose = tensors[count + len(bucket.scalars) :]
        tensors.clear()
        if not gradients and bucket.parameters:
            self.flat(bucket).fill_(-0.0)  # which a sum keeps: no row was used here
        elif bucket.axis is not None or bucket.tied:
            self.flat(bucket)
            targets = self._memory.views[bucket] + self._memory.scalars[bucket]
            if bucket.group is None:  # optimizers of shards are elementwise
                own = zip(bucket.parameters, gradients, strict=False)
                self._sparse |= {name: g.sparse_dim() for name, g in own if g.is_sparse}
            _join(targets, [*gradients, *scalars], fresh)
        elif gradients:
            if fresh:
                self._memory.views[bucket] = self._own(bucket, gradients)
            else:
                self._memory.views[bucket] = _added(self._memory.views[bucket], gradients)
        if loose and begins:
            self._loose = [tensor.clone() for tensor in loose]
        elif loose:
            foreach.add_(self._loose, loose)

    def _own(self, bucket: Bucket, gradients: list[Tensor]) -> list[Tensor]:
        """Tensors that may be written in place: copies of those that share memory or are broadcast."""
        if bucket not in self._copies:
            seen = self._memory.pointers()
            copies = []
            for gradient in gradients:
                if gradient.is_sparse:  # made anew by every backward
                    copies.append(False)
                    continue
                pointer = gradient.untyped_storage().data_ptr()
                whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
                copies.append(not whole or pointer in seen)
                seen.add(pointer)
            self._copies[bucket] = copies
        flags = self._copies[bucket]
        return [g.clone() if copy else g for g, copy in zip(gradients, flags, strict=True)]

    def scalars(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        """`total` (and a late `weight`) after the sums."""
        found = {
            name: tensor
            for bucket in buckets
            for name, tensor in zip(bucket.scalars, self._memory.scalars.get(bucket, ()), strict=False)
        }
        names = [name for name in ("total", "weight") if name not in found]
        return found | dict(zip(names, self._loose, strict=False))

    def gradients(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        """All gradients by parameter name, as this rank has them."""
        return {
            name: tensor
            for bucket in buckets
            if bucket.parameters
            for name, tensor in zip(bucket.parameters, self._parts(bucket), strict=True)
            if name not in self.frozen and not (name in self.conditional and is_absent(tensor))
        }

    def _parts(self, bucket: Bucket) -> Sequence[Tensor]:
        if bucket in self._gone.gradients:
            return list(self._gone.gradients[bucket].values())
        if bucket.group is None:
            return self._memory.views.get(bucket, ())
        holding = self._state.holding
        assert holding is not None
        return bucket.group.chunk_views(self._kept[bucket], holding.data_coordinate)

    def buffer(self, name: str) -> Tensor:
        """A buffer that travelled in a bucket."""
        for bucket, views in self._memory.views.items():
            if name in bucket.buffers:
                return views[bucket.buffers.index(name)]
        raise KeyError(name)

    def finish(
        self,
        buckets: Sequence[Bucket],
        *,
        late_weight: Tensor | None,
        clip: Clip,
        squares: Tensor | None = None,
    ) -> Tensor | None:
        """Divide by the weight, clip by norms, then by values; returns the norm of what was clipped by norms.

        `squares` are the sums of all squares, for each norm, where this rank does not have all gradients.
        """
        if late_weight is None and not clip:
            return None
        if clip:
            self._coalesce(buckets)
        here = self.gradients(self._here(buckets))
        factor = late_weight.reciprocal() if late_weight is not None else None
        norms = []
        own, far = by_norm(clip, here), by_norm(clip, self._gone.norms)
        for position in sorted({*own, *far}):
            tensors = own.get(position, [])
            norm = (
                torch.linalg.vector_norm(torch.stack([*norms_of(tensors), *far.get(position, ())]))
                if squares is None
                else squares[position].sqrt()
            )
            norm = norm * factor if factor is not None else norm
            scale = (clip.norms[position][1] / (norm + 1e-6)).clamp(
                max=1.0
            )  # as torch.nn.utils.clip_grad_norm_
            scale = scale * factor if factor is not None else scale
            if tensors:
                foreach.mul_(entries(tensors), scale)
            self._gone.scale(clip, position, scale)
            norms.append(norm)
        if factor is not None:
            left = [tensor for name, tensor in here.items() if clip.norm_of(name) is None]
            if left:
                foreach.mul_(entries(left), factor)
            self._gone.scale(clip, None, factor)
        clamp(clip, here)
        self._gone.clamp(clip)
        if not clip.norms:
            return None
        if squares is not None:  # also where this rank has no gradients, or not of all norms
            whole = squares.sum().sqrt()
            return whole * factor if factor is not None else whole
        if not norms:
            return torch.zeros((), dtype=self._state.dtype, device=self._state.device)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _coalesce(self, buckets: Sequence[Bucket]) -> None:
        """Give every row of sparse gradients one entry, so that the squares of entries add up to the norm's."""
        for bucket in buckets:
            if any(view.is_sparse for view in self._memory.views.get(bucket, ())):
                self._memory.views[bucket] = [
                    v.coalesce() if v.is_sparse else v for v in self._memory.views[bucket]
                ]

    def hand_over(self, buckets: Sequence[Bucket], *, part: bool = False) -> None:
        """Put the gradients where the optimizer looks for them; `part`: those of other buckets come apart."""
        gradients = {n: lying_as(g, self._state.parameters[n]) for n, g in self.gradients(buckets).items()}
        if any(bucket in self._gone.gradients for bucket in buckets):
            self._gone.finish(gradients)
        if self.on_ready is not None:
            dense = {name: g.to_dense() if g.is_sparse else g for name, g in gradients.items()}
            if part:
                self._ready |= {name: gradient.clone() for name, gradient in dense.items()}
            else:
                self.on_ready(dense)
        for name in self._handed.difference(gradients):  # as after `zero_grad`
            self._state.parameters[name].grad = None
        self._handed = set(gradients)  # a part is handed over after the one before it
        for name, gradient in gradients.items():
            dims = self._sparse.get(name)
            self._state.parameters[name].grad = gradient if dims is None else to_sparse(gradient, dims)

    def tell_parts(self) -> None:
        """All parts of a step were handed over."""
        if self.on_ready is not None and self._ready:
            found, self._ready = self._ready, {}
            self.on_ready(found)

    def take_back(self, buckets: Sequence[Bucket]) -> None:
        """Free gradients of these buckets that are made anew every step."""
        for bucket in buckets:
            if bucket in self._gone.gradients:
                self._gone.forget(bucket)
                for name in bucket.parameters:
                    if name in self._state.parameters:
                        self._state.parameters[name].grad = None
            elif bucket.axis is None and not bucket.tied:
                for name in bucket.parameters:
                    self._state.parameters[name].grad = None
                self._memory.views.pop(bucket, None)


def _added(sums: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Dense ones in place; sparse ones become longer."""
    if not any(tensor.is_sparse for tensor in (*sums, *gradients)):
        foreach.add_(sums, gradients)
        return sums
    return [g + s if s.is_sparse else s.add_(g) for s, g in zip(sums, gradients, strict=True)]


def _join(targets: list[Tensor], sources: list[Tensor], fresh: bool) -> None:
    """Into tensors that travel, which are dense."""
    sources = [to_dense(source) if source.is_sparse else source for source in sources]
    if fresh:
        moved = [(t, s) for t, s in zip(targets, sources, strict=True) if t.data_ptr() != s.data_ptr()]
        if moved:  # the others were made in their place
            foreach.copy_([target for target, _ in moved], [source for _, source in moved])
    else:
        foreach.add_(targets, sources)
