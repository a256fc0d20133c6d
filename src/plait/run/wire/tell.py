"""What every rank has to say, to all ranks: JSON in tensors, checked for size, never a pickle.

In: a JSON-able value on each rank of the default group. Out: the list of all values, on every rank.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

from plait.errors import RunError

MOST_BYTES = 1 << 28
"""Of a message that is believed."""


def tell(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; all of them must call it."""
    text = json.dumps(value).encode()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = dist.get_world_size()
    size = torch.tensor([len(text)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    counts = [int(found) for found in sizes]
    if not all(0 < count <= MOST_BYTES for count in counts):
        raise RunError(f"ranks want to tell {counts} bytes; between 1 and {MOST_BYTES} are allowed.")
    own = torch.zeros(max(counts), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    own = own.to(device)
    rooms = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(rooms, own)
    return [
        _read(rank, bytes(room[:count].cpu().numpy()))
        for rank, (room, count) in enumerate(zip(rooms, counts, strict=True))
    ]


def _read(rank: int, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"what rank {rank} tells is not JSON: {error}.") from error
