"""What of a step lies on the host, and how its updates are taken apart for it.

In: the instructions of a step, the shares that the plan keeps on the host. Out: instructions with copies. The optimizer
works part by part: the state of a part is fetched while the device computes, and leaves when the part is updated.
Where nothing but its own gradients decides about an update, it comes while the backward goes on, and its gradients are
given up at once. What the host updates itself lies there, weights included: gradients leave when they are summed, and
weights come back for the next step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.plan.offload import offload_shares
from plait.plan.plan import Plan
from plait.program.instructions import Instruction
from plait.program.layout import Layout
from plait.program.program import Bucket
from plait.program.value import Value
from plait.program.write.activations import activation_parcels
from plait.program.write.offload import Parcel, with_copies
from plait.program.write.parts import Part, with_parts, with_squares
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
    parts = _parts(instructions, buckets, layout, known, away, indices, sizes)
    parcels = [
        Parcel(values=part.state, num_bytes=part.state_bytes, lasting=True)
        for part in parts
        if part.is_away and not part.on_host
    ]
    made = with_parts(with_squares(instructions, parts), parts, early=not away.update_is_late)
    if (share := away.shares.get("parameters", 0.0)) > 0:
        parcels += _parameter_parcels(made, layout, known, away.groups, parts, share)
    if (share := away.shares.get("activations", 0.0)) > 0:
        parcels += activation_parcels(made, known.specs, known.storages, share)
    moving = {value for parcel in parcels for value in parcel.values}
    for part in parts:
        if part.on_host:
            parcels += _host_parcels(part, buckets, layout, known, moving)
    return with_copies(made, parcels, known.shows)


def _parts(
    instructions: Sequence[Instruction],
    buckets: Sequence[Bucket],
    layout: Layout,
    known: StepValues,
    away: Away,
    indices: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
) -> list[Part]:
    """The parts of the update; those that come first have the most time to leave, and for the host to work."""
    read = {value for instruction in instructions for value in instruction.reads}
    shares = {kind: away.shares.get(kind, 0.0) for kind in ("optimizer", "gradients")}
    elements = [sum(buckets[index].num_bytes for index in part) for part in indices]
    parts, stored, updated = [], 0.0, 0.0
    for part, size, num_bytes in zip(indices, sizes, elements, strict=True):
        made = _part(part, buckets, layout, known.shows, size)
        on_host = updated < shares["gradients"] * sum(elements) and read.issuperset(made.updated)
        is_away = size > 0 and (on_host or stored < shares["optimizer"] * sum(sizes))
        stored, updated = stored + size, updated + num_bytes
        parts.append(replace(made, is_away=is_away, on_host=on_host))
    return parts


def _host_parcels(
    part: Part, buckets: Sequence[Bucket], layout: Layout, known: StepValues, moving: Collection[Value]
) -> list[Parcel]:
    """Gradients that leave for the host's update, and the weights that come from it, where they do not move anyway."""
    made = [
        Parcel(
            values=(value,), num_bytes=_gradient_bytes(buckets[value.number]), lasting=False, stays=True,
            wanted=True,
        )
        for value in part.gradients
    ]  # fmt: skip
    values = tuple(value for value in part.updated if value not in moving)
    if values:
        num_bytes = sum(_bytes_of(value, layout, known) for value in values)
        made.append(Parcel(values=values, num_bytes=num_bytes, lasting=True, stays=True))
    return made


def _gradient_bytes(bucket: Bucket) -> int:
    """What this rank has of a summed bucket."""
    return bucket.num_bytes // (bucket.group.chunks if bucket.group is not None else 1)


def _bytes_of(value: Value, layout: Layout, known: StepValues) -> int:
    """Of a parameter, or of this rank's chunk of some."""
    if value.kind == "chunk":
        group = layout.groups[value.number]
        return group.chunk_elements * group.dtype.itemsize
    return known.specs[value].num_bytes


def _parameter_parcels(
    instructions: Sequence[Instruction],
    layout: Layout,
    known: StepValues,
    groups: Mapping[str, int],
    parts: Sequence[Part],
    share: float,
) -> list[Parcel]:
    """So much of the parameters, or of this rank's chunks of them, in the order of their use; those that the host
    updates apart from the others."""
    read = dict.fromkeys(value for instruction in instructions for value in instruction.reads)
    there = {value for part in parts if part.on_host for value in part.updated}
    found: dict[tuple[int, bool], list[Value]] = {}
    for value in read:
        if value.kind == "chunk" or (value.kind == "parameter" and not layout.groups):
            number = value.number if value.kind == "chunk" else groups[value.name]
            found.setdefault((number, value in there), []).append(value)
    sizes = {key: sum(_bytes_of(value, layout, known) for value in own) for key, own in found.items()}
    wanted, taken, parcels = share * sum(sizes.values()), 0, []
    for key in sorted(found):
        if taken < wanted:
            taken += sizes[key]
            parcels.append(Parcel(values=tuple(found[key]), num_bytes=sizes[key], lasting=True))
    return parcels


def _part(
    indices: tuple[int, ...],
    buckets: Sequence[Bucket],
    layout: Layout,
    shows: Mapping[Value, Value],
    state_bytes: int,
) -> Part:
    """On the device, with its state."""
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
        state_bytes=state_bytes,
        is_away=False,
        on_host=False,
    )
