"""What every rank has to say, to all ranks: JSON and the bytes of tensors, checked for size and type, never a pickle.

In: a value on each rank of the default group, of None, truth, numbers, text, lists, tuples, dicts by text, tensors and
dtypes. Out: the list of all values, on every rank; tuples come back as lists, tensors on the host.
"""

import json
import struct
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import RunError

MOST_BYTES = 1 << 32
"""Of what one rank may tell: whoever claims more is refused before room is made for it."""
_JSON_BYTES = struct.Struct("<Q")
_DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}


def tell(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks; all of them must call it."""
    told = encode(value)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = dist.get_world_size()
    size = torch.tensor([len(told)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    counts = [int(found) for found in sizes]
    if not all(0 < count <= MOST_BYTES for count in counts):
        raise RunError(f"ranks want to tell {counts} bytes; between 1 and {MOST_BYTES} are allowed.")
    own = torch.zeros(max(counts), dtype=torch.uint8)
    own[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    own = own.to(device)
    rooms = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(rooms, own)
    found = []
    for rank, (room, count) in enumerate(zip(rooms, counts, strict=True)):
        try:
            found.append(decode(room[:count].cpu()))
        except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
            raise RunError(f"what rank {rank} tells cannot be read: {error}.") from error
    return found


def encode(value: Any) -> bytes:
    """A value as bytes: how long its JSON is, the JSON, the bytes of its tensors."""
    parts: list[bytes] = []
    text = json.dumps(_plain(value, parts)).encode()
    return b"".join((_JSON_BYTES.pack(len(text)), text, *parts))


def decode(told: Tensor) -> Any:
    """The value again; a ValueError or its like where these are not the bytes of one."""
    (count,) = _JSON_BYTES.unpack(bytes(told[: _JSON_BYTES.size].numpy()))
    start = _JSON_BYTES.size + count
    if start > len(told):
        raise ValueError(f"{count} bytes of JSON in a message of {len(told)}")
    return _value(json.loads(bytes(told[_JSON_BYTES.size : start].numpy())), told[start:])


def _plain(value: Any, parts: list[bytes]) -> Any:
    """A value as JSON, where every list says what it is; the bytes of tensors go to `parts`."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            flat = value.detach().cpu().contiguous().view(-1)
            start = sum(map(len, parts))
            parts.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
            return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), start]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case list() | tuple():
            return ["list", [_plain(entry, parts) for entry in value]]
        case dict() if all(isinstance(key, str) for key in value):
            return ["dict", {key: _plain(entry, parts) for key, entry in value.items()}]
    raise TypeError(f"{type(value).__name__} cannot be told")


def _value(plain: Any, body: Tensor) -> Any:
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case ["list", list(entries)]:
            return [_value(entry, body) for entry in entries]
        case ["dict", dict(entries)]:
            return {key: _value(entry, body) for key, entry in entries.items()}
        case ["dtype", str(name)]:
            return _DTYPES[name]
        case ["tensor", str(name), list(shape), int(start)] if all(type(n) is int and n >= 0 for n in shape):
            end = start + prod(shape) * _DTYPES[name].itemsize
            if not 0 <= start <= end <= len(body):
                raise ValueError(f"a tensor of bytes {start} to {end} in {len(body)}")
            return body[start:end].clone().view(_DTYPES[name]).view(shape)
    raise ValueError("no value of ours")
