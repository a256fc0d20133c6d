"""Every rank's shard of a tensor, or sums over all ranks, for checkpoints, evaluation and verification: rare, so plain.

In: this rank's shard of a tensor that is held like a parameter. Out: the shards of all ranks, who ask for the same in
the same order; or the sum of what each has.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.program.layout import Layout
from plait.run.wire.tell import tell


def add_up(tensor: Tensor, ranks: int, device: torch.device) -> Tensor:
    """The sum of what all ranks have, on the host; `device` is where they compute. One rank's is its own."""
    if ranks == 1:
        return tensor
    placed = tensor.to(device) if dist.get_backend() == "nccl" else tensor
    dist.all_reduce(placed)
    return placed.cpu()


class ProcessShardFetcher:
    """Between processes, through torch.distributed."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __call__(self, name: str, shard: Tensor) -> list[Tensor]:
        """Every rank's shard of a tensor like the parameter `name`, in the order of ranks."""
        ranks = range(self._layout.mesh.size)
        shapes = [torch.Size(self._layout.held_shape(name, rank)) for rank in ranks]
        device = shard.device if dist.get_backend() == "nccl" else torch.device("cpu")
        own = torch.zeros(max(shape.numel() for shape in shapes), dtype=shard.dtype, device=device)
        own[: shard.numel()] = shard.detach().reshape(-1)
        found = [torch.empty_like(own) for _ in ranks]
        dist.all_gather(found, own)
        return [flat[: shape.numel()].view(shape) for flat, shape in zip(found, shapes, strict=True)]

    def tell(self, value: Any) -> list[Any]:
        """What every rank has to say: plain values and tensors."""
        return tell(value)
