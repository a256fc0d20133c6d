"""Read the costs of a model's units off its captured graph.

In: a graph and the plan along `tensor`. Out: `ModelCosts`. The graph is localized for a rank with one sample and for
one with three; their nodes pair up, and each pair of numbers is a line. A unit is a numbered module with modules of its
own (a block), or a module between blocks; equal blocks in a row become one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.graph.storage import owner_of
from plait.nodes import ancestors
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, TENSOR, Plan
from plait.program.cost.op_time import OpWork, node_work, op_name
from plait.program.local.communicate import COLLECTIVES
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.op_keys import find_blocks
from plait.program.place.place import place
from plait.program.segment.recompute import is_backward
from plait.program.segment.recompute_choice import choose
from plait.program.segment.split import only_for_gradients
from plait.search.place.resolve import resolve_placements
from plait.search.predict.model_costs import Amount, CollectiveCost, ModelCosts, OpCost, Phase, UnitCosts
from plait.search.predict.unit_nodes import (
    elements_of,
    random_masks,
    readers_of,
)
from plait.torch_private import pytree

CAPTURED = 4
"""Samples of the graph that costs are read from."""
_FEW, _MANY = 1, 3
"""Samples of the two ranks between which a line is drawn."""
SETTINGS = ("none", "selective", "full")
"""Of `memory.recompute`."""


def model_costs(graph: Graph, plan: Plan, make: "MakeReader | None" = None) -> ModelCosts:
    """The costs of a graph of `CAPTURED` samples on a rank of `plan.mesh`'s `tensor` axis.

    `make` is a reader that sees the model as another system runs it; None: as its graph says.
    """
    tensor = plan.mesh.size_of(TENSOR)
    axes = ((DATA, 2), (TENSOR, tensor)) if tensor > 1 else ((DATA, 2),)
    narrow = replace(plan, mesh=Mesh(axes=axes))
    narrow, _ = resolve_placements(graph, narrow)
    placed = place(graph, narrow, (_FEW, _MANY))
    zeros = (0,) * (len(axes) - 1)
    few = localize(graph, placed, (0, *zeros), local_batch_norm=True)
    many = localize(graph, placed, (1, *zeros), local_batch_norm=True)
    return (make or UnitReader)(graph, few, many, tensor).read()


class UnitReader:
    """Reads the units of a model; what a system does otherwise than its graph says is in methods of its own."""

    def __init__(self, graph: Graph, few: LocalGraph, many: LocalGraph, tensor: int) -> None:
        self.graph, self.few, self.tensor = graph, few, tensor
        self.nodes = [node for node in few.graph.nodes if node.op == "call_function"]
        twins = [node for node in many.graph.nodes if node.op == "call_function"]
        assert [n.target for n in self.nodes] == [n.target for n in twins], "ranks differ in their ops"
        self.twin = dict(zip(few.graph.nodes, many.graph.nodes, strict=True))
        self.blocks = find_blocks(graph)
        self.unit_of, self.keys = self._units()
        backward, unit_of = [node for node in self.nodes if is_backward(node)], self.unit_of
        self.weights = only_for_gradients(backward, lambda reader, node: unit_of[reader] == unit_of[node])
        self.masks = random_masks(self.nodes) | random_masks(twins)
        last = len(self.keys) - 1
        loss = {n for n in self.nodes if self.unit_of[n] == last and not n.meta.get("module", "")}
        self.loss = loss | {self.twin[node] for node in loss}
        self.again = {setting: self.runs_again(setting) for setting in SETTINGS}

    def read(self) -> ModelCosts:
        """Every unit, equal ones folded."""
        names = {entry.node: entry.name for entry in self.graph.inputs_of("parameter")}
        readers: dict[fx.Node, set[int]] = {}
        for node in self.nodes:
            if not is_backward(node):
                for source in node.all_input_nodes:
                    if source.op == "placeholder" and source.name in names:
                        readers.setdefault(source, set()).add(self.unit_of[node])
        units = [self._unit(index, readers) for index in range(len(self.keys))]
        trainable = sum(elements_of(n) for n in readers if names[n.name] in self.graph.gradients)
        dtypes = [s.dtype for u in units for s in u.steps if isinstance(s, OpCost) and s.kind == "matmul"]
        return ModelCosts(
            units=_folded(units),
            tensor=self.tensor,
            dtype=max(set(dtypes), key=dtypes.count) if dtypes else "float32",
            trainable=trainable / max(1, sum(map(elements_of, readers))),
        )

    def _units(self) -> tuple[dict[fx.Node, int], list[tuple[str, bool]]]:
        """The unit of every node: runs of forward nodes of one block or module; backward ops go with forward ops."""
        unit_of: dict[fx.Node, int] = {}
        keys: list[tuple[str, bool]] = []
        by_origin: dict[str, int] = {}
        for node in self.nodes:
            if is_backward(node):
                continue
            key = self._key(node.meta.get("module", ""))
            if not keys or (key[0] and key != keys[-1]):
                keys.append(key)
            unit_of[node] = len(keys) - 1
            by_origin.setdefault(node.meta.get("lowers", node.name), unit_of[node])
        last: dict[tuple[str, bool], int] = {key: index for index, key in enumerate(keys)}
        current = len(keys) - 1
        for node in self.nodes:
            if is_backward(node):
                key = self._key(node.meta.get("module", ""))
                current = by_origin.get(
                    node.meta.get("origin", ""), last.get(key, current) if key[0] else current
                )
                unit_of[node] = current
        return unit_of, keys

    def _key(self, module: str) -> tuple[str, bool]:
        words = module.split(".")
        for end in range(1, len(words) + 1):
            path = ".".join(words[:end])
            if words[end - 1].isdigit() and path in self.blocks:
                return path, True
        return module, False

    def runs_again(self, setting: str | Sequence[str]) -> set[fx.Node]:
        """Ops of the forward that run again in the backward under a setting of `memory.recompute`."""
        if setting == "none":
            return set()
        found = choose(self.graph, self.few, setting)
        chosen = {node for node in self.nodes if node.name in found.nodes}
        read = [source for node in self.nodes if is_backward(node) for source in node.all_input_nodes]
        return ancestors(read, chosen.__contains__)

    def _unit(self, index: int, readers: Mapping[fx.Node, set[int]]) -> UnitCosts:
        own = [node for node in self.nodes if self.unit_of[node] == index]
        held = [node for node, units in readers.items() if index == min(units)]
        shared = [node for node, units in readers.items() if index in units and index > min(units)]
        kept = {setting: self.kept(index, own, setting) for setting in SETTINGS}
        name, is_block = self.keys[index]
        return UnitCosts(
            name=name,
            repeat=1,
            is_block=is_block,
            steps=tuple(self._steps(own)),
            parameters=sum(map(elements_of, held)),
            parameter_bytes=sum(elements_of(node) * node.meta["val"].element_size() for node in held),
            shared=sum(map(elements_of, shared)),
            kept=kept,
            peak=self._peak(own, kept["none"]),
            leaves=self.leaves(index),
        )

    def _steps(self, own: Sequence[fx.Node]) -> Iterable[OpCost | CollectiveCost]:
        works = {node: (self.work(node), self.work(self.twin[node])) for node in own}
        for node, (few, many) in works.items():
            phase: Phase = "forward"
            if is_backward(node):
                phase = "weight" if node in self.weights else "input"
            again = frozenset(setting for setting, nodes in self.again.items() if node in nodes)
            if self.is_regathered(node):
                again = frozenset(SETTINGS)
            if node.target in COLLECTIVES:
                yield CollectiveCost(
                    phase=phase, kind=op_name(node.target), axis=str(node.args[1]),
                    num_bytes=_line(*(self._moved(n) for n in (node, self.twin[node]))), again=again,
                )  # fmt: skip
            elif few is not None and many is not None:
                lines = {
                    field.name: _line(getattr(few, field.name), getattr(many, field.name))
                    for field in fields(OpWork)
                    if field.name not in ("kind", "dtype")
                }
                yield OpCost(phase=phase, kind=few.kind, dtype=few.dtype, again=again, **lines)

    def is_regathered(self, node: fx.Node) -> bool:
        """Whether what is gathered is not kept for the backward but gathered again."""
        return False

    def _moved(self, node: fx.Node) -> float:
        """Bytes of the whole tensor that a collective moves."""
        sizes = [self.num_bytes(node), *(self.num_bytes(source) for source in node.all_input_nodes)]
        return max(sizes)

    def work(self, node: fx.Node) -> OpWork | None:
        """What an op costs; None: nothing, or it is part of another's."""
        work = node_work(node)
        return None if work is None else replace(work, num_bytes=max(self.traffic(node, work), 0.0))

    def traffic(self, node: fx.Node, work: OpWork) -> float:
        """Bytes that an op reads and writes, where masks have a byte for each element."""
        masks = [tensor for tensor in (node, *node.all_input_nodes) if tensor in self.masks]
        wide = sum(elements_of(mask) * self.width(mask, mask.meta["val"]) for mask in masks)
        return work.num_bytes - wide + sum(self.num_bytes(mask) for mask in masks)

    def width(self, node: fx.Node, value: torch.Tensor) -> float:
        """Bytes of an element of what a node makes."""
        return value.element_size()

    def num_bytes(self, node: fx.Node) -> float:
        """Bytes of what a node makes."""
        leaves = [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
        return sum(leaf.numel() * (1.0 if node in self.masks else self.width(node, leaf)) for leaf in leaves)

    def kept(self, index: int, own: Sequence[fx.Node], setting: str) -> Amount:
        """Storages that a unit's forward makes and a backward reads, but for those that are made again."""
        again = self.again[setting]
        found: dict[fx.Node, None] = {}
        for node in own:
            if is_backward(node) or node in again:
                continue
            if any(is_backward(user) or (user in again and node not in again) for user in node.users):
                made = owner_of(node)
                found[owner_of(made.all_input_nodes[0]) if self.is_regathered(made) else made] = None
        found = {node: None for node in found if node.op == "call_function"}
        return _line(
            *(sum(self.num_bytes(n) for n in side) for side in (found, [self.twin[n] for n in found]))
        )

    def _peak(self, own: Sequence[fx.Node], kept: Amount) -> Amount:
        """Most that lives at once in a unit's backward: what is kept, and what the backward itself has made."""
        sides = []
        for nodes in (own, [self.twin[node] for node in own]):
            backward = [node for node in nodes if node.meta["phase"] == "backward"]
            place_of = {node: at for at, node in enumerate(backward)}
            dying: dict[int, list[fx.Node]] = {}
            for node in backward:
                if owner_of(node) is node and not any(user.op == "output" for user in readers_of(node)):
                    last = max((place_of.get(user, len(backward)) for user in readers_of(node)), default=0)
                    dying.setdefault(last, []).append(node)
            alive = most = 0.0
            for at, node in enumerate(backward):
                if owner_of(node) is node and not any(user.op == "output" for user in readers_of(node)):
                    alive += self.num_bytes(node)
                most = max(most, alive)
                alive -= sum(self.num_bytes(gone) for gone in dying.get(at, ()))
            sides.append(most)
        return kept + _line(*sides)

    def leaves(self, index: int) -> Amount:
        """What the forward of later units reads of this one, or of those before it."""
        found = {
            owner_of(node): None
            for node in self.nodes
            if not is_backward(node)
            and self.unit_of[node] <= index
            and any(not is_backward(u) and self.unit_of.get(u, -1) > index for u in node.users)
        }
        made = [node for node in found if node.op == "call_function" and self._scales(node)]
        return _line(*(sum(self.num_bytes(n) for n in side) for side in (made, [self.twin[n] for n in made])))

    def _scales(self, node: fx.Node) -> bool:
        return self.num_bytes(node) != self.num_bytes(self.twin[node])


def _line(few: float, many: float) -> Amount:
    slope = (many - few) / (_MANY - _FEW)
    return Amount(few - slope * _FEW, slope)


def _folded(units: Sequence[UnitCosts]) -> tuple[UnitCosts, ...]:
    found: list[UnitCosts] = []
    for unit in units:
        before: Any = found[-1] if found else None
        if before is not None and unit.is_block and before.is_block and _same(before, unit):
            found[-1] = replace(before, repeat=before.repeat + 1)
        else:
            found.append(unit)
    return tuple(found)


def _same(one: UnitCosts, other: UnitCosts) -> bool:
    return replace(one, name="", repeat=1) == replace(other, name="", repeat=1)


MakeReader = Callable[[Graph, LocalGraph, LocalGraph, int], UnitReader]
"""As `UnitReader` itself: the graph, its local form with few and with many samples, ranks of `tensor`."""
