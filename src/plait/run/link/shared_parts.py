"""What one rank does of a collective once all ranks' tensors can be read: sums in the order of ranks, pieces, edges.

In: flat tensors of all ranks, in the order of the group. Out: this rank's result, or its part of everybody's. Every
byte is read once. Nothing waits here: `shared_links` sees to it that the tensors are there.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from plait.program.instructions import Collective
from plait.run.link.links import edges, with_halo, with_halo_added

_BLOCK = 1 << 16
"""Elements that more than two ranks add up at once."""


def staged(tensor: Tensor, collective: Collective) -> list[Tensor]:
    """What others read of a tensor."""
    return list(edges(tensor, collective)) if collective.op in ("halo", "halo_add") else [tensor]


def sum_of_all(parts: Sequence[Tensor]) -> Tensor:
    """A new tensor with the sum."""
    total = torch.add(parts[0], parts[1])
    for part in parts[2:]:
        total.add_(part)
    return total


def sum_for_all(parts: Sequence[Tensor], own: int) -> None:
    """The `own`-th of equal pieces of the sum, written to every rank's tensor."""
    size = -(-parts[0].numel() // len(parts))
    for blocks in _blocks([part[own * size : (own + 1) * size] for part in parts]):
        torch.add(blocks[0], blocks[1], out=blocks[0])
        for block in blocks[2:]:
            blocks[0].add_(block)
        for block in blocks[1:]:
            block.copy_(blocks[0])


def sum_piece(
    parts: Sequence[Tensor], shape: Sequence[int], collective: Collective, own: int, in_place: bool
) -> Tensor:
    """The own piece of the sum; in place, it takes the place of the piece in the own tensor."""
    start, extent = sum(collective.extents[:own]), collective.extents[own]
    if not in_place or collective.dim != 0:
        return sum_of_all([part.view(*shape).narrow(collective.dim, start, extent) for part in parts])
    row = parts[0].numel() // max(shape[0], 1)
    flat = [part[start * row : (start + extent) * row] for part in parts]
    for blocks in _blocks(flat):
        if own > 1:  # its own summand comes later in the order of ranks than the sum would be written over it
            blocks[own].copy_(sum_of_all(blocks))
            continue
        torch.add(blocks[0], blocks[1], out=blocks[own])
        for block in blocks[2:]:
            blocks[own].add_(block)
    return flat[own].view(extent, *shape[1:])


def _blocks(parts: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """The same elements of all ranks, few enough at once for the sum of several ranks to stay in the cache."""
    count = parts[0].numel()
    if len(parts) == 2 and count:
        yield parts
        return
    for at in range(0, count, _BLOCK):
        yield [part[at : at + _BLOCK] for part in parts]


def joined(
    parts: Sequence[Tensor], shape: Sequence[int], collective: Collective, out: Tensor | None
) -> Tensor:
    """All pieces on `dim`, in `out` where it is given; a piece that is already in its place there stays."""
    dim = collective.dim
    pieces = [
        part.view(*shape[:dim], extent, *shape[dim + 1 :])
        for part, extent in zip(parts, collective.extents, strict=True)
    ]
    if out is None:
        return torch.cat(pieces, dim)
    whole = out.view(sum(collective.extents), *shape[1:])
    places = torch.split(whole, list(collective.extents))
    for place, piece in zip(places, pieces, strict=True):
        if place.data_ptr() != piece.data_ptr():
            place.copy_(piece)
    return out


def between_neighbours(parts: Sequence[Tensor], tensor: Tensor, collective: Collective, own: int) -> Tensor:
    """A halo or the sum of halos, from the edges that the ranks before and after have `staged`."""
    up, down = edges(tensor, collective)
    before = parts[own - 1][up.numel() :].view(down.shape) if own > 0 else None
    after = parts[own + 1][: up.numel()].view(up.shape) if own + 1 < len(parts) else None
    between = with_halo if collective.op == "halo" else with_halo_added
    return between(tensor, before, after, collective)
