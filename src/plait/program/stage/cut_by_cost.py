"""Where to cut a row of ops into stages: about equal costs, little to send, and no more memory than there is.

In: ops in order with their costs. Out: the places where the second and later stages begin. It knows nothing of backward
ops, which follow their forward ops.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import fx

from plait.errors import PlanError
from plait.graph.cost import value_bytes
from plait.program.stage.partition import Array, best_starts, between
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
    the best balance of those cuts in which every stage has room.
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
    table, sent = between([sums[point] for point in points]), np.array([crossing[p] for p in points])
    sent[-1] = 0.0  # nothing crosses the end
    needs = _Needs(room, memory, points) if room is not None else None
    tables = [table if needs is None else needs.limited(table, stage) for stage in range(num_stages)]
    found = best_starts(tables, lambda found: np.broadcast_to(sent, found.shape), _SLACK)
    if found is None:
        assert needs is not None
        raise needs.refusal(num_stages)
    return [points[start] for start in found[0]]


class _Needs:
    """The memory of stages, from sums over the ops before each point."""

    def __init__(self, room: Room, memory: Sequence[tuple[int, int]], points: Sequence[int]) -> None:
        held = [0, *accumulate(own for own, _ in memory)]
        kept = [0, *accumulate(saved for _, saved in memory)]
        self.room = room
        self.states = room.held * held[-1] / room.parameter_parts
        self.activations = kept[-1] / room.activation_parts
        self._states = between([room.held * held[point] / room.parameter_parts for point in points])
        self._activations = between([kept[point] / room.activation_parts for point in points])

    def limited(self, costs: Array, stage: int) -> Array:
        """The costs of a stage, infinite where it has no room."""
        needed = self._states + self.room.in_flight[stage] * self._activations
        return np.where(needed <= self.room.limit_bytes, costs, np.inf)

    def refusal(self, num_stages: int) -> PlanError:
        """No cut has room."""
        return PlanError(
            f"pipe: no cut into {num_stages} stages fits in {format_bytes(self.room.limit_bytes)} a rank: weights, "
            f"gradients and optimizer state take {format_bytes(self.states)} in all, the activations of a micro-batch "
            f"{format_bytes(self.activations)}, of which up to {max(self.room.in_flight)} are kept.",
            fix="use more stages, more and smaller micro-batches, a schedule that keeps fewer, or raise memory.limit.",
        )


_SLACK = 1.02
"""How much costlier the costliest stage may be than need be where that sends less."""
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
