"""Where to cut a row of ops into stages: about equal costs, little to send, and no more memory than there is.

In: ops in order with their costs. Out: the places where the second and later stages begin. Dynamic programming over
places; it knows nothing of backward ops, which follow their forward ops.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from plait.errors import PlanError
from plait.graph.cost import value_bytes
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory that stages may use; activations and parameters are those of one micro-batch over all ranks."""

    limit_bytes: int
    """Of one stage."""
    in_flight: tuple[int, ...]
    """Micro-batches whose activations each stage keeps at once."""
    held: float
    """Bytes of weights, gradients and optimizer state for each byte of a parameter."""
    parameter_parts: int = 1
    """Ranks among which a stage's parameters are cut."""
    activation_parts: int = 1
    """Ranks among which a stage's activations are cut."""


def real_users(node: fx.Node) -> list[fx.Node]:
    """Who reads a node, seen through the choice of one of its outputs."""
    users: list[fx.Node] = []
    for user in node.users:
        users += real_users(user) if user.target is operator.getitem else [user]
    return users


def starts_by_cost(
    forward: Sequence[fx.Node],
    costs: Sequence[float],
    num_stages: int,
    places: Collection[int] | None,
    room: Room | None = None,
    memory: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """Where the second and later stages begin: the best balance within 2 %, and of those what sends least.

    `room` and, for every op, (bytes of parameters that it is the first to use, bytes that it keeps for the backward):
    balance is given up step by step until every stage has room.
    """
    inside = [place for place in range(1, len(forward)) if places is None or place in places]
    if len(inside) + 1 < num_stages:
        raise PlanError(
            f"pipe: the model has {len(inside) + 1} ops for {num_stages} stages.",
            fix=f"use at most {len(inside) + 1} stages.",
        )
    crossing = _crossing_bytes(forward)
    sums = [0.0, *accumulate(costs)]
    points = _points(sums, crossing, inside, max(_MOST_POINTS, 4 * num_stages))
    at = [sums[point] for point in points]
    allowed = _least_limit(at, num_stages) * 1.02
    needs = _Needs(room, memory, points) if room is not None else None
    while True:
        found = _best_starts(at, [crossing[point] for point in points], num_stages, allowed, needs)
        if found is not None:
            return [points[start] for start in found]
        if allowed > sums[-1]:
            assert needs is not None
            raise needs.refusal(num_stages)
        allowed *= 1.1


class _Needs:
    """The memory of stages, from sums over the ops before each point."""

    def __init__(self, room: Room, memory: Sequence[tuple[int, int]], points: Sequence[int]) -> None:
        held = [0, *accumulate(own for own, _ in memory)]
        kept = [0, *accumulate(saved for _, saved in memory)]
        self.room = room
        self.held = [held[point] for point in points]
        self.kept = [kept[point] for point in points]

    def fits(self, stage: int, start: int, end: int) -> bool:
        """Whether a stage between two points has room."""
        states = self.room.held * (self.held[end] - self.held[start]) / self.room.parameter_parts
        activations = (self.kept[end] - self.kept[start]) / self.room.activation_parts
        return states + self.room.in_flight[stage] * activations <= self.room.limit_bytes

    def refusal(self, num_stages: int) -> PlanError:
        """No cut has room."""
        states = self.room.held * self.held[-1] / self.room.parameter_parts
        activations = self.kept[-1] / self.room.activation_parts
        return PlanError(
            f"pipe: no cut into {num_stages} stages fits in {format_bytes(self.room.limit_bytes)} a rank: weights, "
            f"gradients and optimizer state take {format_bytes(states)} in all, the activations of a micro-batch "
            f"{format_bytes(activations)}, of which up to {max(self.room.in_flight)} are kept.",
            fix="use more stages, more and smaller micro-batches, a schedule that keeps fewer, or raise memory.limit.",
        )


def _best_starts(
    at: Sequence[float], crossing: Sequence[float], num_stages: int, allowed: float, needs: _Needs | None
) -> list[int] | None:
    """The cut that sends least of those whose stages cost at most `allowed` and have room, by points; None: none."""
    last = len(at) - 1
    best: list[list[float]] = [[0.0] + [float("inf")] * last]
    came: list[list[int]] = [[0] * (last + 1)]
    for stage in range(1, num_stages + 1):
        row, back = [float("inf")] * (last + 1), [0] * (last + 1)
        for end in range(stage, last + 1):
            for start in range(end - 1, stage - 2, -1):
                if at[end] - at[start] > allowed or (needs and not needs.fits(stage - 1, start, end)):
                    break
                value = best[stage - 1][start] + (crossing[end] if end < last else 0.0)
                if value < row[end]:
                    row[end], back[end] = value, start
        best.append(row)
        came.append(back)
    if best[num_stages][last] == float("inf"):
        return None
    starts = []
    end = last
    for stage in range(num_stages, 1, -1):
        end = came[stage][end]
        starts.append(end)
    return sorted(starts)


_MOST_POINTS = 256
"""Places that are considered for a cut; more make the search slower, not the balance better."""


def _points(sums: Sequence[float], crossing: Sequence[float], inside: Sequence[int], most: int) -> list[int]:
    """Places for cuts: of each stretch of about equal cost the one that sends least."""
    count = len(sums) - 1
    if len(inside) < most:
        return [0, *inside, count]
    chosen: dict[int, int] = {}
    for point in inside:
        stretch = int(sums[point] / sums[-1] * most)
        if stretch not in chosen or crossing[point] < crossing[chosen[stretch]]:
            chosen[stretch] = point
    return [0, *sorted(chosen.values()), count]


def _least_limit(sums: Sequence[float], num_stages: int) -> float:
    """The least cost of the costliest stage, found by halving."""
    largest = max(b - a for a, b in pairwise(sums))
    low, high = max(largest, sums[-1] / num_stages), sums[-1]
    for _ in range(50):
        middle = (low + high) / 2
        if _stages_needed(sums, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return high


def _stages_needed(sums: Sequence[float], limit: float) -> int:
    needed, start = 1, 0.0
    for a, b in pairwise(sums):
        if b - start > limit:
            needed, start = needed + 1, a
    return needed


def _crossing_bytes(forward: Sequence[fx.Node]) -> list[float]:
    """For every place between two ops, the bytes that a cut there would send forward (and back as gradients)."""
    position = {node: index for index, node in enumerate(forward)}
    change = [0.0] * (len(forward) + 2)
    for node, index in position.items():
        last = max((position[user] for user in real_users(node) if user in position), default=index)
        size = value_bytes(node.meta["val"])
        change[index + 1] += size
        change[last + 1] -= size
    return list(accumulate(change))
