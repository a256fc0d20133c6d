"""Time the transfers of a program between processes of this machine, each by itself.

In: a program. Out: what there is to time, and on each rank seconds by `transfer_key`. All ranks time the same list in
the same order, in groups of the size that the program has; the ranks of a group start together, so that waiting for
each other is not counted. Halos are not timed, nor what threads do.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from plait.plan.mesh import Mesh
from plait.program.cost.brought import brought
from plait.program.cost.op_key import is_placed, transfer_key
from plait.program.instructions import Collective, Recv, Send
from plait.program.program import Program
from plait.program.value import Value
from plait.run.link.between import links_between
from plait.run.link.links import Links

_OTHERS, _GROUP = "data", "tensor"
_CPU = torch.device("cpu")
_TIMED = ("all_reduce", "all_gather", "reduce_scatter")
"""Those that processes make; what threads do in one process is priced by its bytes."""
_REPEATS = 9
"""Of every transfer: the median of nine stands when four are disturbed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedTransfer:
    """Something to time."""

    key: str
    """Under which its time is kept."""
    size: int
    """Ranks that meet."""
    instruction: Collective | Send
    """As it stands in the program."""
    shape: tuple[int, ...]
    """Of the tensor that a rank brings."""
    dtype: torch.dtype
    placed: bool
    """Whether the tensor lies where links find it: buckets and chunks of parameters."""


def transfers_of(program: Program, busy: int) -> list[TimedTransfer]:
    """All transfers that differ, in the same order wherever it is asked."""
    mesh = program.plan.mesh
    found: dict[str, TimedTransfer] = {}
    for entry in program.classes:
        for instruction in entry.instructions:
            shape: tuple[int, ...]
            if isinstance(instruction, Send):
                size = 2
                shape, dtype = (max(instruction.num_bytes, 1),), torch.uint8
            elif isinstance(instruction, Collective) and instruction.op in _TIMED:
                size = mesh.size_of(instruction.axis)
                shape, dtype = brought(program, entry, instruction)
            else:
                continue
            if size > 1:
                key = transfer_key(instruction, size, busy)
                found[key] = TimedTransfer(
                    key=key,
                    size=size,
                    instruction=instruction,
                    shape=shape,
                    dtype=dtype,
                    placed=is_placed(instruction),
                )
    return [found[key] for key in sorted(found)]


def time_transfers(transfers: Sequence[TimedTransfer], rank: int, ranks: int) -> dict[str, float]:
    """Seconds by key, as this rank saw them; all ranks must be here, in one process group."""
    found: dict[str, float] = {}
    links: dict[int, Links] = {}
    for transfer in transfers:
        size = transfer.size
        if ranks % size:
            continue
        if size not in links:
            mesh = Mesh(axes=((_OTHERS, ranks // size), (_GROUP, size)))
            links[size] = links_between(mesh, rank, _CPU, timeout_s=60.0)
        if isinstance(transfer.instruction, Send):
            found[transfer.key] = _message(transfer, links[size], rank % size)
        else:
            found[transfer.key] = _collective(transfer, transfer.instruction, links[size])
    return found


def _collective(transfer: TimedTransfer, like: Collective, links: Links) -> float:
    instruction = Collective(
        name=like.name, op=like.op, axis=_GROUP, dim=like.dim, extents=like.extents, reads=(Value.bucket(0),),
        writes=(Value.bucket(0),), num_bytes=like.num_bytes,
    )  # fmt: skip
    count = torch.Size(transfer.shape).numel()
    tensor = links.buffer(count, transfer.dtype, _CPU, _GROUP) if transfer.placed else None
    own = tensor if tensor is not None else torch.zeros(transfer.shape, dtype=transfer.dtype)
    gathers = transfer.placed and like.op == "all_gather"
    times = []
    for _ in range(_REPEATS):
        _meet(links)
        began = time.perf_counter()
        given = own.clone() if like.op == "all_reduce" and not transfer.placed else own
        out = torch.empty(count * transfer.size, dtype=transfer.dtype) if gathers else None
        links.start(instruction, given, out).result()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def _message(transfer: TimedTransfer, links: Links, place: int) -> float:
    """Half of the way there and back."""
    flat = torch.zeros(transfer.shape, dtype=torch.uint8)
    times = []
    for number in range(_REPEATS):
        _meet(links)
        began = time.perf_counter()
        for leg in (0, 1):
            message = f"{transfer.key} {number} {leg}"
            if place == leg:
                send = Send(
                    id=0, name=message, kind="communication", axis=_GROUP, to=1 - leg, message=message
                )
                links.send(send, flat).result()
            else:
                recv = Recv(
                    id=0, name=message, kind="communication", axis=_GROUP, source=leg, message=message
                )
                links.receive(recv, torch.empty_like(flat)).result()
        times.append((time.perf_counter() - began) / 2)
    return median(times[1:])


def _meet(links: Links) -> None:
    here = (Value.bucket(0),)
    instruction = Collective(name="meet", op="all_reduce", axis=_GROUP, reads=here, writes=here)
    links.start(instruction, torch.zeros(1)).result()


def mean_of_ranks(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What several ranks saw, by key."""
    keys = dict.fromkeys(key for entry in found for key in entry)
    return {key: _mean([entry[key] for entry in found if key in entry]) for key in keys}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
