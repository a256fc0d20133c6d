"""Gradients that travel compressed, on one rank: what is sent of a bucket, what stays behind, and back.

In: a bucket's flat tensor. Out: messages, and in the end the bucket with the sum of what all ranks have sent. What
powersgd and topk do not send stays here and is added to the same gradients of the next step (error feedback): over all
ranks, what was sent and what stays add up to the gradients. That rest is not part of checkpoints.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.plan.decisions import Sync
from plait.program.program import Bucket
from plait.program.write.compression import CASTS, INDEX, Matrix, matrices, num_kept
from plait.run.link.links import Links

GUESS_SEED = 20190531
"""Of powersgd's first guesses, which must be the same on all ranks."""

_SAMPLE = 1 << 14
"""Gradients of a bucket, at least, that tell how large the largest are."""
_MARGIN = 64
"""Of the sample, more than are expected among the largest: where few are kept, chance decides how many those are."""


class Compressor:
    """What one rank remembers of its compressed buckets from step to step."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._rooms: dict[tuple[Bucket, int], Tensor] = {}
        self._rests: dict[Bucket, Tensor] = {}
        self._guesses: dict[Bucket, list[Tensor]] = {}
        """Of powersgd, the right factors of the step before."""

    def rest(self, bucket: Bucket) -> Tensor | None:
        """What has not been sent yet of a bucket's gradients."""
        return self._rests.get(bucket)

    def compress(self, bucket: Bucket, flat: Tensor, sync: Sync, part: int, before: Tensor | None) -> Tensor:
        """The message of a part; `before` is the sum of the part before it."""
        if sync.compress in CASTS:
            room = self._room(bucket, 0, bucket.num_elements, CASTS[sync.compress], flat.device)
            return room.copy_(flat)
        if part == 0 and bucket in self._rests:
            flat.add_(self._rests[bucket])
        if sync.compress == "topk":
            return self._largest(bucket, flat, num_kept(bucket, sync.compress_keep))
        cut = matrices(bucket, sync.compress_rank)
        if part == 0:
            return self._left(bucket, flat, cut)
        assert before is not None
        return self._right(bucket, flat, cut, before)

    def decompress(self, bucket: Bucket, flat: Tensor, sync: Sync, sums: Sequence[Tensor]) -> None:
        """Write the sum of what all ranks have sent to the bucket."""
        if sync.compress in CASTS:
            flat.copy_(sums[0])
            return
        if sync.compress == "topk":
            kept = num_kept(bucket, sync.compress_keep)
            flat.zero_()
            for values, places in _opened(sums[0], kept, bucket.dtype):
                flat.index_add_(0, places, values)
            return
        cut = matrices(bucket, sync.compress_rank)
        views, rest = _views(bucket, flat), _pieces(sums[0], _left_sizes(bucket, cut))
        whole = [view for position, view in enumerate(views) if position not in {m.position for m in cut}]
        for view, piece in zip(whole, rest[len(cut) :], strict=True):
            view.copy_(piece.view(view.shape))
        if cut:
            rights = _pieces(sums[1], [m.columns * m.rank for m in cut])
            guesses = self._guesses[bucket]
            for matrix, left, right, guess in zip(cut, rest, rights, guesses, strict=False):
                factor = right.view(matrix.columns, matrix.rank)
                torch.mm(left.view(matrix.rows, matrix.rank), factor.t(), out=_matrix(views, matrix))
                guess.copy_(factor)

    def _left(self, bucket: Bucket, flat: Tensor, cut: Sequence[Matrix]) -> Tensor:
        """Each matrix times the right factor of the step before, then what is sent whole."""
        sizes = _left_sizes(bucket, cut)
        room = self._room(bucket, 0, sum(sizes), bucket.dtype, flat.device)
        pieces, views = _pieces(room, sizes), _views(bucket, flat)
        if bucket not in self._guesses:
            self._guesses[bucket] = _first_guesses(cut, bucket.dtype, flat.device)
        for matrix, guess, piece in zip(cut, self._guesses[bucket], pieces, strict=False):
            torch.mm(_matrix(views, matrix), guess, out=piece.view(matrix.rows, matrix.rank))
        chosen = {matrix.position for matrix in cut}
        whole = [view for position, view in enumerate(views) if position not in chosen]
        for view, piece in zip(whole, pieces[len(cut) :], strict=True):
            piece.copy_(view.reshape(-1))
        return room

    def _right(self, bucket: Bucket, flat: Tensor, cut: Sequence[Matrix], summed: Tensor) -> Tensor:
        """Each matrix's part along the orthonormal left factor, which replaces the sum; the rest stays here."""
        sizes = [matrix.columns * matrix.rank for matrix in cut]
        room = self._room(bucket, 1, sum(sizes), bucket.dtype, flat.device)
        if bucket not in self._rests:
            self._rests[bucket] = torch.zeros_like(flat)
        rests, views = _views(bucket, self._rests[bucket]), _views(bucket, flat)
        lefts = _pieces(summed, _left_sizes(bucket, cut))
        for matrix, left, piece in zip(cut, lefts, _pieces(room, sizes), strict=False):
            factor = left.view(matrix.rows, matrix.rank)
            factor.copy_(torch.linalg.qr(factor)[0])
            own, right = _matrix(views, matrix), piece.view(matrix.columns, matrix.rank)
            torch.mm(own.t(), factor, out=right)
            torch.addmm(own, factor, right.t(), alpha=-1, out=_matrix(rests, matrix))
        return room

    def _largest(self, bucket: Bucket, flat: Tensor, kept: int) -> Tensor:
        """The largest values and their places; the rest stays here."""
        places = _largest_places(flat.abs(), kept)
        message = flat.new_empty(kept * (bucket.dtype.itemsize + INDEX.itemsize), dtype=torch.uint8)
        split = kept * bucket.dtype.itemsize
        message[:split].view(bucket.dtype).copy_(flat[places])
        message[split:].view(INDEX).copy_(places)
        if bucket not in self._rests:
            self._rests[bucket] = torch.empty_like(flat)
        self._rests[bucket].copy_(flat)[places] = 0
        return message

    def _room(
        self, bucket: Bucket, part: int, count: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory of a message, from which it travels fastest."""
        if (bucket, part) not in self._rooms:
            assert bucket.axis is not None
            self._rooms[bucket, part] = self._links.buffer(count, dtype, device, bucket.axis)
        return self._rooms[bucket, part]


def _largest_places(sizes: Tensor, kept: int) -> Tensor:
    """Where the largest are, those that are no numbers first, as `torch.topk` has them. It takes as long as a sort on a
    processor; so a sample tells what is surely too small, and the largest are looked for among the rest."""
    if not sizes.is_cpu or sizes.numel() < 2 * _SAMPLE:
        return torch.topk(sizes, kept, sorted=False).indices
    sample = sizes[
        :: sizes.numel() // _SAMPLE | 1
    ]  # odd, so that rows of a matrix are met at all of their columns
    expected = kept * len(sample) // sizes.numel()
    low = torch.topk(sample, min(len(sample), 2 * expected + _MARGIN), sorted=False).values.amin()
    near = (sizes < low).logical_not_().nonzero().view(-1)
    if len(near) < kept:
        return torch.topk(sizes, kept, sorted=False).indices
    return near[torch.topk(sizes[near], kept, sorted=False).indices]


def _opened(gathered: Tensor, kept: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """(values, places) of every rank, in their order."""
    split = kept * dtype.itemsize
    messages = gathered.view(-1, split + kept * INDEX.itemsize)
    return [(m[:split].clone().view(dtype), m[split:].clone().view(INDEX)) for m in messages]


def _first_guesses(cut: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(GUESS_SEED)
    made = [torch.randn(m.columns, m.rank, generator=generator, dtype=torch.float64) for m in cut]
    return [guess.to(device, dtype) for guess in made]


def _left_sizes(bucket: Bucket, cut: Sequence[Matrix]) -> list[int]:
    """Elements of the left factors, then of the gradients that are sent whole."""
    chosen = {matrix.position for matrix in cut}
    whole = [torch.Size(s).numel() for position, s in enumerate(bucket.shapes) if position not in chosen]
    return [matrix.rows * matrix.rank for matrix in cut] + whole


def _pieces(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(flat[: sum(sizes)], list(sizes)))


def _views(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in bucket.shapes]
    return [piece.view(s) for piece, s in zip(_pieces(flat, sizes), bucket.shapes, strict=True)]


def _matrix(views: Sequence[Tensor], matrix: Matrix) -> Tensor:
    return views[matrix.position].view(matrix.rows, matrix.columns)
