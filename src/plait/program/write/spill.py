"""What of a step lies on the host, and how its updates are taken apart for it.

In: the instructions of a step, the shares that the plan keeps on the host. Out: instructions with copies. The optimizer
works part by part: the state of a part is fetched while the device computes, and leaves when the part is updated.
Where nothing but its own gradients decides about an update, it comes while the backward goes on, and its gradients are
given up at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.plan.offload import offload_shares
from plait.plan.plan import Plan
from plait.program.instructions import Instruction
from plait.program.layout import Layout
from plait.program.program import Bucket
from plait.program.value import Value
from plait.program.write.activations import activation_parcels
from plait.program.write.offload import Parcel, Part, with_copies, with_parts
from plait.program.write.step_values import StepValues

_PART_BYTES = 256 << 20
"""Parameters of a part of the update, at most about: large enough that a copy runs at the full rate of the bus."""
_LEAST_PARTS = 8
"""Parts into which small models are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Away:
    """What a rank's step needs to know to keep things on the host."""

    shares: Mapping[str, float]
    """Of each kind, the share that lies there."""
    state_bytes: Callable[[Bucket], int]
    """What the optimizer keeps for a bucket."""
    groups: Mapping[str, int]
    """Groups of parameters that are used together, by name."""
    update_is_late: bool
    """Whether an update must wait for all gradients: for their norm, their weight, or whether the step counts."""


def part_bytes(plan: Plan, parameter_bytes: int) -> float | None:
    """Parameters that are updated together; None: all."""
    if not offload_shares(plan.memory.offload):
        return None
    return max(1, min(_PART_BYTES, parameter_bytes // _LEAST_PARTS))


def parts_of(buckets: Sequence[Bucket], limit: float) -> list[tuple[int, ...]]:
    """Buckets with gradients, one after the other, in parts of about `limit` bytes."""
    parts: list[list[int]] = []
    room = 0.0
    for index, bucket in enumerate(buckets):
        if bucket.parameters:
            if room <= 0:
                parts.append([])
                room = limit
            parts[-1].append(index)
            room -= bucket.num_bytes
    return [tuple(part) for part in parts]


def with_offload(
    instructions: Sequence[Instruction],
    plan: Plan,
    buckets: Sequence[Bucket],
    layout: Layout,
    known: StepValues,
    away: Away,
) -> list[Instruction]:
    """The step with what `away` says on the host."""
    limit = part_bytes(plan, sum(bucket.num_bytes for bucket in buckets))
    assert limit is not None
    indices = parts_of(buckets, limit)
    sizes = [sum(away.state_bytes(buckets[index]) for index in part) for part in indices]
    wanted, stored = away.shares.get("optimizer", 0.0) * sum(sizes), 0.0
    parts, parcels = [], []
    for part, size in zip(indices, sizes, strict=True):
        is_away = size > 0 and stored < wanted  # those that are updated first have the most time to leave
        stored += size
        parts.append(_part(part, buckets, layout, known.shows, is_away=is_away))
        if is_away:
            parcels.append(Parcel(values=parts[-1].state, num_bytes=size, lasting=True))
    made = with_parts(instructions, parts, early=not away.update_is_late)
    if (share := away.shares.get("parameters", 0.0)) > 0:
        parcels += _parameter_parcels(made, layout, known, away.groups, share)
    if (share := away.shares.get("activations", 0.0)) > 0:
        parcels += activation_parcels(made, known.specs, known.storages, share)
    return with_copies(made, parcels, known.shows)


def _parameter_parcels(
    instructions: Sequence[Instruction],
    layout: Layout,
    known: StepValues,
    groups: Mapping[str, int],
    share: float,
) -> list[Parcel]:
    """So much of the parameters, or of this rank's chunks of them, in the order of their use."""
    read = dict.fromkeys(value for instruction in instructions for value in instruction.reads)
    found: dict[int, list[Value]] = {}
    sizes: dict[int, int] = {}
    for value in read:
        if value.kind == "chunk":
            group = layout.groups[value.number]
            found[value.number], sizes[value.number] = [value], group.chunk_elements * group.dtype.itemsize
        elif value.kind == "parameter" and not layout.groups:
            number = groups[value.name]
            found.setdefault(number, []).append(value)
            sizes[number] = sizes.get(number, 0) + known.specs[value].num_bytes
    wanted, taken, parcels = share * sum(sizes.values()), 0, []
    for number in sorted(found):
        if taken < wanted:
            taken += sizes[number]
            parcels.append(Parcel(values=tuple(found[number]), num_bytes=sizes[number], lasting=True))
    return parcels


def _part(
    indices: tuple[int, ...],
    buckets: Sequence[Bucket],
    layout: Layout,
    shows: Mapping[Value, Value],
    *,
    is_away: bool,
) -> Part:
    own = [buckets[index] for index in indices]
    groups = [layout.groups.index(bucket.group) for bucket in own if bucket.group is not None]
    parameters = tuple(Value.parameter(name) for bucket in own for name in bucket.parameters)
    chunks, named = tuple(map(Value.chunk, groups)), set(parameters)
    return Part(
        buckets=indices,
        gradients=tuple(
            (Value.bucket if buckets[index].group is None else Value.shard)(index) for index in indices
        ),
        updated=chunks or parameters,
        seen=frozenset((*chunks, *parameters, *(v for v, shown in shows.items() if shown in named))),
        is_away=is_away,
    )
