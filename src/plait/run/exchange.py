"""Fetch every rank's part of a tensor, for checkpoints, evaluation and verification: rare, so plain.

In: this rank's part of a tensor that is held like a parameter. Out: the parts of all ranks. All ranks call it in the
same order.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from plait.program.layout import Layout


def exchange(layout: Layout, name: str, part: Tensor) -> list[Tensor]:
    """Every rank's part of a tensor like the parameter `name`, in the order of ranks."""
    ranks = range(layout.mesh.size)
    shapes = [layout.held_shape(name, rank) for rank in ranks]
    largest = max(torch.Size(shape).numel() for shape in shapes)
    device = part.device if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.zeros(largest, dtype=part.dtype, device=device)
    own[: part.numel()] = part.detach().reshape(-1)
    found = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(found, own)
    return [flat[: torch.Size(shape).numel()].view(shape) for flat, shape in zip(found, shapes, strict=True)]
