"""Cut a local graph into segments and the communication between them.

In: a local graph and the nodes after which to cut. Out: a list of pieces in execution order: `Segment` (computation),
`Start` (a collective is issued) and `Await` (its result is needed). Communication is never hidden inside a segment.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from plait.program.local.communicate import COLLECTIVES
from plait.program.program import Segment
from plait.program.segment.codegen import make_segment


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is issued here."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Await:
    """The result of a collective is needed from here on."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class Reached:
    """A node that was asked for has been computed."""

    node: str


Piece = Segment | Start | Await | Reached

_AT_HAND = 2
"""Groups of parameters that a piece may read."""


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a local graph is communication."""
    return node.op == "call_function" and node.target in COLLECTIVES


def cut(
    nodes: Sequence[fx.Node],
    wanted: Collection[str],
    cut_after: Collection[str],
    prefix: str,
    device: torch.device,
    group_of: Mapping[str, int] | None = None,
    *,
    groups_stay: bool = False,
) -> list[Piece]:
    """Pieces that compute `wanted` (names), with a cut after each of `cut_after` and between forward and backward.

    `group_of` names inputs that are fetched in groups: a piece starts where a group is needed that is not at hand, for
    the first time where `groups_stay`.
    """
    groups = _groups(nodes, cut_after, group_of or {}, groups_stay)
    wanted_set = set(wanted)
    readers = _readers(groups)
    pieces: list[Piece] = []
    count = 0
    for group in groups:
        if isinstance(group, (Start, Await, Reached)):
            pieces.append(group)
            continue
        inside = {node.name for node in group}
        inputs = dict.fromkeys(n.name for node in group for n in node.all_input_nodes if n.name not in inside)
        outputs = [
            node.name for node in group if node.name in wanted_set or readers.get(node.name, -1) > count
        ]
        phase: Literal["forward", "backward"] = (
            "backward" if group[0].meta["phase"] == "backward" else "forward"
        )
        pieces.append(make_segment(f"{prefix}{phase}_{count}", phase, group, list(inputs), outputs, device))
        count += 1
    return pieces


def _groups(
    nodes: Sequence[fx.Node], cut_after: Collection[str], group_of: Mapping[str, int], groups_stay: bool
) -> list[list[fx.Node] | Start | Await | Reached]:
    groups: list[list[fx.Node] | Start | Await | Reached] = []
    current: list[fx.Node] = []
    pending: set[fx.Node] = set()
    marks = set(cut_after)
    at_hand: list[int] = []

    def close() -> None:
        nonlocal current
        if current:
            groups.append(current)
            current = []

    for node in nodes:
        if node.op != "call_function":
            continue
        awaited = [n for n in node.all_input_nodes if n in pending]
        changed = bool(current) and current[-1].meta["phase"] != node.meta["phase"]
        needed = list(dict.fromkeys(group_of[n.name] for n in node.all_input_nodes if n.name in group_of))
        if awaited or changed or is_collective(node) or not set(needed) <= set(at_hand):
            close()
        # as many stay as an op needs: one with many weights counts as one place, in however many nodes it is written
        room = len(group_of) if groups_stay else max(_AT_HAND, len(needed))
        at_hand = [*(g for g in at_hand if g not in needed), *needed][-room:] if room else []
        for n in awaited:
            groups.append(Await(n))
            pending.discard(n)
        if is_collective(node):
            groups.append(Start(node))
            pending.add(node)
            if node.name in marks:
                groups.append(Await(node))
                pending.discard(node)
        else:
            current.append(node)
        if node.name in marks:
            close()
            groups.append(Reached(node.name))
    close()
    return groups + [Await(node) for node in pending]


def _readers(groups: Sequence[object]) -> dict[str, int]:
    """For each name, the index of the last segment that reads it; a collective counts as a later one."""
    last: dict[str, int] = {}
    index = 0
    for group in groups:
        if isinstance(group, list):
            for node in group:
                for used in node.all_input_nodes:
                    last[used.name] = index
            index += 1
        elif isinstance(group, Start):
            for used in group.node.all_input_nodes:
                last[used.name] = max(last.get(used.name, -1), 1 << 30)
    return last
