"""When parameters that are cut over `data` are gathered, and for how long they stay.

In: the pieces of a micro-batch, which groups they read. Out: windows, in the order in which they open. A group that is
needed again soon stays; otherwise it is dropped and gathered again, as the backward does with what the forward used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.graph.graph import Graph
from plait.plan.plan import Plan
from plait.program.layout import Layout
from plait.program.program import Segment
from plait.program.segment.cut import Piece

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


def groups_by_use(graph: Graph, limit: float) -> dict[str, int]:
    """Parameters in the order of their first use, by placeholder, in groups of about `limit` bytes: where a forward is
    cut whose parameters or activations do not stay."""
    nodes = graph.nodes()
    order = {node.name: index for index, node in enumerate(graph.graph.nodes)}
    found: dict[str, int] = {}
    group, room = -1, 0.0
    for entry in sorted(
        graph.inputs_of("parameter"),
        key=lambda entry: min((order[user.name] for user in nodes[entry.node].users), default=len(order)),
    ):
        if room <= 0:
            group, room = group + 1, limit
        found[entry.node] = group
        room -= int(nodes[entry.node].meta["val"].nbytes)
    return found


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


class Gatherer(Protocol):
    """What fetching asks of the step that is being written."""

    layout: Layout
    plan: Plan

    def start_gather(self, group: int, number: int) -> int: ...

    def end_gather(self, group: int, started: int, number: int) -> None: ...


class Fetch:
    """Gathers the parameters of one micro-batch before the pieces that read them, one window ahead."""

    def __init__(
        self, builder: Gatherer, graph: Graph, pieces: Sequence[Piece], number: int, position: int
    ) -> None:
        layout = builder.layout
        group_of = groups_by_input(graph, layout)
        self.builder, self.number = builder, number
        self.index = {piece.name: i for i, piece in enumerate(pieces) if isinstance(piece, Segment)}
        if layout.zero == 3:
            self.windows = windows(pieces, group_of)
        else:  # what was gathered in the first micro-batch stays
            self.windows = windows(pieces, group_of, nearby=len(pieces)) if position == 0 else []
        self.started: dict[Window, int] = {}

    def before(self, piece: Segment) -> None:
        """Have at hand what a piece reads."""
        index = self.index[piece.name]
        opening = [window for window in self.windows if window.first == index]
        for window in opening:
            self._start(window)
        for window in opening:
            self.builder.end_gather(window.group, self.started[window], self.number)
        if opening and self.builder.plan.sync.overlap:
            ahead = next((w for w in self.windows if w not in self.started), None)
            busy = {w.group for w in self.windows if w in self.started and w.last >= index}
            if ahead is not None and ahead.group not in busy:
                self._start(ahead)

    def _start(self, window: Window) -> None:
        if window not in self.started:
            self.started[window] = self.builder.start_gather(window.group, self.number)
