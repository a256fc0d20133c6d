"""What is drawn of a program: rows of tensors, and the communication between them.

In: a picture's job and plan. Out: a `Scene`, made by walking the instructions that plait compiled, in their order. What
is cut, whole or a summand is read from the placements of the plan; nothing is known here about any plan.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from docs.pictures.models import Picture
from docs.pictures.tensors import Tensor, drawn, flat_tensor, placed_tensor, with_edges
from torch import fx

from plait.graph.graph import Graph
from plait.job.data.open import open_data
from plait.job.order import shares
from plait.plan.named import resolve
from plait.plan.placements import AxisPlacements
from plait.plan.plan import TENSOR
from plait.program.instructions import Collective, Compute, Update
from plait.program.local.communicate import COLLECTIVES, halo, take_shard
from plait.program.local.localize import localize
from plait.program.place.place import place
from plait.program.place.placement import Placement
from plait.program.place.propagate import Placements
from plait.program.program import Program
from plait.run.prepare.programs import Programs

_SIGNS = {
    "mm": "·",
    "relu": "relu",
    "threshold_backward": "relu′",
    "mse_loss": "loss",
    "mse_loss_backward": "loss′",
}
_SIGNS |= {"native_layer_norm": "norm", "native_layer_norm_backward": "norm′"}
_SIGNS |= {"convolution": "∗", "convolution_backward": "∗′"}
_INSIDE = {
    "halo": "neighbours give each other the edges of what they have",
    "halo_add": "neighbours add to each other's edges",
}
"""What communication inside of an op does."""


@dataclass(frozen=True, slots=True)
class Row:
    """One op, or several one behind the other: tensors and signs from left to right."""

    phase: str
    items: tuple[Tensor | str, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """Communication: all ranks meet."""

    collective: str
    """`none`: ranks take a piece of what they have."""
    text: str


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture."""

    title: str
    ranks: tuple[str, ...]
    """What each rank is called, with its coordinates."""
    parts: tuple[Row | Bar, ...]


def make_scene(picture: Picture) -> Scene:
    """Compile the picture's step and walk through it."""
    job = picture.job()
    plan = resolve(picture.plan, None, picture.settings, picture.mesh)
    if picture.batch:
        said = AxisPlacements(axis=TENSOR, batch=tuple(picture.batch.items()))
        plan = replace(plan, placements=(said,))
    programs = Programs(job, open_data(job.data, job.collate), plan, torch.device("cpu"))
    program = programs.for_sizes([shares(picture.samples, plan.data_ranks)])
    graph = programs.captures.of_size(picture.samples)
    walk = _Walk(graph, program, place(graph, programs.plan, program.shares[0]), picture)
    mesh = plan.mesh
    names = []
    for rank in range(mesh.size):
        where = [
            f"{name} {at}"
            for (name, size), at in zip(mesh.axes, mesh.coordinates(rank), strict=True)
            if size > 1
        ]
        names.append(f"rank {rank}" + (f" ({', '.join(where)})" if len(where) > 1 else ""))
    return Scene(picture.title, tuple(names), tuple(walk.parts()))


class _Walk:
    def __init__(
        self, graph: Graph, program: Program, chosen: Sequence[Placements], picture: Picture
    ) -> None:
        self.graph, self.program, self.chosen, self.picture = graph, program, chosen, picture
        self.nodes = graph.nodes()
        mesh = program.plan.mesh
        self.places = [mesh.coordinates(rank) for rank in range(mesh.size)]
        self.local = localize(graph, chosen, mesh.coordinates(0), local_batch_norm=False)
        self.labels = {entry.node: picture.labels.get(entry.name, entry.name) for entry in graph.inputs}
        self.labels |= {name: text for name, text in picture.labels.items() if name in self.nodes}
        for entry in graph.inputs_of("parameter"):
            self.labels[entry.node] = self._short(entry.name)
        for name, node in graph.gradients.items():
            self.labels[node] = f"d{self._short(name)}"
        self.done: set[fx.Node] = set()

    def parts(self) -> Iterator[Row | Bar]:
        """Rows and bars in the order of the program; what continues a row is joined to it."""
        rows: list[Row | Bar] = []
        for part in self._parts():
            last = rows[-1] if rows else None
            if isinstance(part, Row) and isinstance(last, Row) and _continues(last, part):
                rows[-1] = Row(last.phase, (*last.items, *part.items[1:]))
            else:
                rows.append(part)
        yield self._held()
        yield from rows

    def _parts(self) -> Iterator[Row | Bar]:
        by_name = {node.name: node for node in self.local.graph.nodes}
        for instruction in self.program.of(0).instructions:
            if isinstance(instruction, Compute):
                segment = self.program.of(0).segments[instruction.segment]
                yield from self._compute([by_name[name] for name in segment.outputs])
            elif isinstance(instruction, Collective):
                node = by_name.get(instruction.name.partition(" ")[2])
                if node is not None and node.target in COLLECTIVES:
                    self.done.add(node)
                    yield Bar(instruction.op, self._said(node, instruction))
                else:
                    yield from self._of_the_step(instruction)
            elif isinstance(instruction, Update):
                yield Row("update", ("update of what each rank holds",))

    def _compute(self, outputs: Sequence[fx.Node]) -> Iterator[Row | Bar]:
        """The rows of the local nodes that `outputs` need and that were not drawn before."""
        needed: set[fx.Node] = set()
        stack = [node for node in outputs if node not in self.done]
        while stack:
            node = stack.pop()
            if node not in needed and node not in self.done and node.op == "call_function":
                needed.add(node)
                stack += node.all_input_nodes
        seen: set[str] = set()
        for node in self.local.graph.nodes:
            if node not in needed:
                continue
            self.done.add(node)
            change = node.meta.get("change")
            if change is not None:
                if node.target is take_shard:
                    yield Bar("none", f"{self._label(change.tensor)}: every rank takes its piece")
            elif node.meta["lowers"] not in seen:
                seen.add(node.meta["lowers"])
                yield from self._row(self.nodes[node.meta["lowers"]], self._edges(node))

    def _edges(self, local: fx.Node) -> tuple[int, int]:
        """How much of its neighbours' pieces an op reads."""
        source = local.args[0] if local.args else None
        if isinstance(source, fx.Node) and source.target is halo:
            before, after = source.args[3:5]
            return int(str(before)), int(str(after))
        return 0, 0

    def _row(self, node: fx.Node, edges: tuple[int, int]) -> Iterator[Row]:
        kind = _kind(node)
        if kind not in _SIGNS:
            return
        strategies = [placements.strategies[node] for placements in self.chosen]
        inputs = [leaf for leaf in node.args if isinstance(leaf, fx.Node)]
        tensors = [
            self._tensor(leaf, [strategy.inputs[index] for strategy in strategies])
            for index, leaf in enumerate(inputs)
        ]
        shown = {"mse_loss_backward": [1, 2], "native_layer_norm": [0], "native_layer_norm_backward": [0]}
        shown |= {"mse_loss": [0], "threshold_backward": [0], "convolution_backward": [0]}
        operands = [tensors[index] for index in shown.get(kind, range(len(tensors)))]
        items: list[Tensor | str] = []
        if kind in ("mm", "convolution"):
            items = [with_edges(operands[0], *edges), _SIGNS[kind], operands[1], "="]
        elif kind == "mse_loss_backward":
            items = [operands[0], "−", operands[1], "→"]
        else:
            items = [operands[0], f"{_SIGNS[kind]} →"]
        for index, output in self._outputs(node):
            placements = [strategy.outputs[index] for strategy in strategies]
            items.append(self._tensor(output, placements))
        yield Row(str(node.meta["phase"]), tuple(items))

    def _outputs(self, node: fx.Node) -> list[tuple[int, fx.Node]]:
        """The results of an op that are drawn: those that the step goes on with, without statistics."""
        if isinstance(node.meta["val"], torch.Tensor):
            return [(0, node)]
        found = [
            (user.args[1], user) for user in node.users if user.target is operator.getitem and user.users
        ]
        gradients = set(self.graph.gradients.values())
        return [(i, user) for i, user in found if i == 0 or user.name in gradients]  # type: ignore[misc]

    def _held(self) -> Row:
        """Memory that outlives the step: parameters, their gradients, optimizer state."""
        items: list[Tensor | str] = []
        layout = self.program.layout
        for entry in self.graph.inputs_of("parameter"):
            node = self.nodes[entry.node]
            if node.meta["val"].ndim == 1:
                continue
            for what, stage in (("", 3), ("d", 2), ("state ", 1)):
                flat = bool(layout.groups) and layout.zero >= stage
                have = [placements.of(node) for placements in self.chosen]
                tensor = self._tensor(node, have, flat=entry.name if flat else None)
                items.append(replace(tensor, name=what + tensor.name))
        return Row("held", tuple(items))

    def _of_the_step(self, instruction: Collective) -> Iterator[Row | Bar]:
        kind, _, number = instruction.name.partition(" ")[2].replace(" ", ":").partition(":")
        if kind == "parameters":
            names = self.program.layout.groups[int(number)].parameters
            parts = (
                "the parts of all"
                if self.program.layout.zero == 3
                else "what others updated in the last step"
            )
            text = f"{', '.join(map(self._short, names))}: every rank gets {parts}"
            yield Bar(instruction.op, f"all_gather over {instruction.axis}   {text}")
            return
        bucket = self.program.buckets[int(number)]
        if not bucket.parameters:
            return  # the loss alone, for people to read
        gradients = ", ".join(f"d{self._short(name)}" for name in bucket.parameters)
        part = "its part of the sum" if instruction.op == "reduce_scatter" else "the sum"
        yield Bar(
            instruction.op, f"{instruction.op} over {instruction.axis}   {gradients}: every rank gets {part}"
        )
        yield Row("backward", tuple(self._gradients(bucket.parameters, instruction.op == "reduce_scatter")))

    def _gradients(self, names: Sequence[str], flat: bool) -> Iterator[Tensor]:
        nodes = {entry.name: self.nodes[entry.node] for entry in self.graph.inputs_of("parameter")}
        for name in names:
            have = [placements.of(nodes[name]) for placements in self.chosen]
            tensor = self._tensor(nodes[name], have, flat=name if flat else None)
            yield replace(tensor, name=f"d{tensor.name}")

    def _said(self, node: fx.Node, instruction: Collective) -> str:
        change = node.meta.get("change")
        op = f"{instruction.op} over {instruction.axis}   "
        if change is None:
            return op + _INSIDE[instruction.op]
        index = [placements.axis.name for placements in self.chosen].index(instruction.axis)
        does = {
            "all_reduce": "the summands are added, every rank gets the sum",
            "reduce_scatter": "the summands are added, every rank gets its piece of the sum",
            "all_gather": "every rank gets the pieces of all",
        }[instruction.op]
        moved = 2 - change.tensor.meta["val"].ndim
        have, want = drawn(change.have[index], moved), drawn(change.want[index], moved)
        return f"{op}{self._label(change.tensor)}: {have} → {want}, {does}"

    def _short(self, name: str) -> str:
        return self.picture.labels.get(name, name.rpartition(".")[2])

    def _label(self, node: fx.Node) -> str:
        """The name of a tensor; views have that of what they look into."""
        if node.name in self.labels:
            return self.labels[node.name]
        if node.op == "call_function" and isinstance(node.args[0], fx.Node):
            if _kind(node) == "t":
                return f"{self._label(node.args[0])}ᵀ"
            if _kind(node) in ("view", "_unsafe_view", "getitem"):
                return self._label(node.args[0])
        return node.name

    def _tensor(self, node: fx.Node, placements: Sequence[Placement], *, flat: str | None = None) -> Tensor:
        axes = [placed.axis for placed in self.chosen]
        shape = [int(extent) for extent in node.meta["val"].shape]
        tensor = placed_tensor(self._label(node), shape, placements, axes, self.places)
        if flat is None:
            return tensor
        plan, groups = self.program.plan, self.program.layout.groups
        group = next(group for group in groups if flat in group.parameters)
        spans = [
            group.span(group.parameters.index(flat), plan.data_coordinate(rank))
            for rank in range(plan.mesh.size)
        ]
        return flat_tensor(tensor, spans)


def _continues(last: Row, row: Row) -> bool:
    first, end = row.items[0], last.items[-1]
    is_next = isinstance(first, Tensor) and first == end
    return (
        is_next and last.phase == row.phase and isinstance(row.items[1], str) and row.items[1].endswith("→")
    )


def _kind(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))
