"""When parameters that are cut over `data` are gathered, and for how long they stay.

In: the pieces of a micro-batch, which groups they read. Out: windows, in the order in which they open. A group that is
needed again soon stays; otherwise it is dropped and gathered again, as the backward does with what the forward used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.graph.graph import Graph
from plait.program.cut import Piece
from plait.program.layout import Layout
from plait.program.program import Segment

NEARBY = 2
"""A group stays from one piece that reads it to the next if at most so many pieces lie between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A stretch of pieces during which a group is at hand."""

    group: int
    first: int
    """Index of the first piece that reads it."""
    last: int
    """Index of the last one."""


def groups_by_input(graph: Graph, layout: Layout) -> dict[str, int]:
    """The group of each parameter that is gathered, by placeholder."""
    of_name = {name: index for index, group in enumerate(layout.groups) for name in group.parameters}
    return {
        entry.node: of_name[entry.name] for entry in graph.inputs_of("parameter") if entry.name in of_name
    }


def windows(pieces: Sequence[Piece], group_of: Mapping[str, int], *, nearby: int = NEARBY) -> list[Window]:
    """Windows of all groups that `pieces` read, by their first piece."""
    segments = [index for index, piece in enumerate(pieces) if isinstance(piece, Segment)]
    reads: dict[int, list[int]] = {}
    for position, index in enumerate(segments):
        piece = pieces[index]
        assert isinstance(piece, Segment)
        for group in dict.fromkeys(group_of[name] for name in piece.inputs if name in group_of):
            reads.setdefault(group, []).append(position)
    found = []
    for group, positions in reads.items():
        first = last = positions[0]
        for position in positions[1:]:
            if position - last > nearby:
                found.append(Window(group=group, first=segments[first], last=segments[last]))
                first = position
            last = position
        found.append(Window(group=group, first=segments[first], last=segments[last]))
    return sorted(found, key=lambda window: (window.first, window.group))
