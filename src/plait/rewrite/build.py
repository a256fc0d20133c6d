"""The graph that was chosen, as a `Graph` like the one that was captured.

In: a graph, its terms, classes, the way of each class. Out: a graph that computes the same under the same names, with
new values; nodes that stay keep their names and marks. Parameters side by side are one op, `beside`.
"""

import heapq
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from plait.graph.graph import Graph
from plait.graph.ops.beside import BESIDE
from plait.rewrite.gradients import join_gradients
from plait.rewrite.marks import mark
from plait.rewrite.rules.language import WORDS
from plait.rewrite.saturate import Classes, Way
from plait.rewrite.solve import Choice
from plait.rewrite.terms import Terms
from plait.rewrite.values import Values, same_inputs
from plait.rewrite.words import sources_of

aten = torch.ops.aten
_GRADIENTS = ("convx", "convw", "convs")


def build(graph: Graph, terms: Terms, classes: Classes, choice: Choice, written: Choice) -> Graph:
    """The graph of the ways that were chosen."""
    made = _Build(graph, terms, classes, choice, written).run()
    return replace(graph, **made)


@dataclass(slots=True)
class _Build:
    graph: Graph
    terms: Terms
    classes: Classes
    choice: Choice
    written: Choice
    """The ways of the captured graph."""
    new: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[int, fx.Node] = field(default_factory=dict)
    """By class."""
    _first: dict[int, int] = field(default_factory=dict)
    """Of each class the term that was first."""
    _values: Values = field(default_factory=Values)

    def run(self) -> dict[str, Any]:
        for at, own in enumerate(self.classes.of_term):
            self._first.setdefault(own, at)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self._adopt(node, self.new.placeholder(node.name))
        for node in self.graph.graph.nodes:
            if node.op == "get_attr":
                self._adopt(node, self.new.create_node("get_attr", node.target, name=node.name))
        parts = self._needed()
        late = self._late(parts)
        for own in self._order(parts, late):
            if own not in self.nodes:
                self._make(own, parts[own], late=own in late)
        old = {node.name: node for node in self.graph.graph.nodes}
        output = next(node for node in self.graph.graph.nodes if node.op == "output")

        def now(name: str) -> fx.Node:
            return self.nodes[self.classes.of_term[self.terms.of_node[old[name]]]]

        end = self.new.output(map_arg(output.args[0], lambda node: now(node.name)))
        end.meta = dict(output.meta)
        self.new.eliminate_dead_code()
        self._split()
        instead = join_gradients(self.new, self._values)
        self.nodes = {own: instead.get(node, node) for own, node in self.nodes.items()}
        mark(self.graph.graph, self.new, self._present())
        self.new.eliminate_dead_code()
        self.new.lint()
        graph = self.graph
        return {
            "graph": self.new,
            "total": now(graph.total).name,
            "weight": now(graph.weight).name,
            "gradients": {name: now(node).name for name, node in graph.gradients.items()},
            "new_buffers": {name: now(node).name for name, node in graph.new_buffers.items()},
            "known": {},
        }

    def _present(self) -> dict[fx.Node, fx.Node]:
        """Of each captured node the new one that computes the same, if any does."""
        own = {
            node: self.classes.of_term[self.terms.of_node[node]]
            for node in self.graph.graph.nodes
            if node.op != "output"
        }
        return {node: self.nodes[at] for node, at in own.items() if at in self.nodes}

    def _adopt(self, old: fx.Node, made: fx.Node) -> None:
        made.meta = dict(old.meta)
        self.nodes[self.classes.of_term[self.terms.of_node[old]]] = made

    def _way(self, own: int) -> Way:
        return self.classes.ways[own][self.choice[own]]

    def _needed(self) -> dict[int, tuple[int, ...]]:
        """Every class that is computed, with what it is made of."""
        ends = [
            node
            for node in self.graph.graph.nodes
            if node.op == "placeholder" or any(user.op == "output" for user in node.users)
        ]
        stack = [self.classes.of_term[self.terms.of_node[node]] for node in ends]
        found: dict[int, tuple[int, ...]] = {}
        while stack:
            own = stack.pop()
            if own not in found:
                found[own] = self._parts(own)
                stack.extend(found[own])
        return found

    def _parts(self, own: int) -> tuple[int, ...]:
        """What a class is made of: of tensors side by side, all that are not made of others for this alone."""
        way = self._way(own)
        if way.word != "cat":
            return way.tensors
        found: list[int] = []
        stack = list(reversed(way.tensors))
        while stack:
            source = stack.pop()
            inner = self._way(source)
            if inner.word == "cat" and inner.numbers == way.numbers:
                stack.extend(reversed(inner.tensors))
            else:
                found.append(source)
        return tuple(found)

    def _late(self, parts: Mapping[int, tuple[int, ...]]) -> set[int]:
        """Classes that are computed in the backward: those that must be, and those that nothing before it needs."""
        forward = {
            self.classes.of_term[self.terms.of_node[node]]
            for node in self.graph.graph.nodes
            if node.op != "output" and node.meta["phase"] == "forward"
        }
        stack = [own for own in forward if own in parts]
        needed: set[int] = set()
        while stack:
            own = stack.pop()
            if own not in needed:
                needed.add(own)
                stack.extend(parts[own])
        return set(parts) - needed

    def _order(self, parts: Mapping[int, tuple[int, ...]], late: set[int]) -> list[int]:
        """All classes, each after what it needs: the forward first, else as in the graph that was captured."""
        place: dict[int, int] = {}
        for number, node in enumerate(self.graph.graph.nodes):
            if node.op != "output":
                place.setdefault(self.classes.of_term[self.terms.of_node[node]], number)
        captured = set(place)
        for own in self._last_first(parts):  # what is new stands right before what needs it first
            for source in parts[own]:
                if source not in captured:
                    place[source] = min(place.get(source, place[own]), place[own])
        users: dict[int, list[int]] = {}
        waits = {}
        for own, sources in parts.items():
            waits[own] = len(set(sources))
            for source in set(sources):
                users.setdefault(source, []).append(own)
        ready = [(own in late, place[own], own) for own, count in waits.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            *_, own = heapq.heappop(ready)
            found.append(own)
            for user in users.get(own, ()):
                waits[user] -= 1
                if not waits[user]:
                    heapq.heappush(ready, (user in late, place[user], user))
        assert len(found) == len(parts), "the ways that were chosen lead in a circle"
        return found

    @staticmethod
    def _last_first(parts: Mapping[int, tuple[int, ...]]) -> list[int]:
        """All classes, each before what it needs."""
        found: list[int] = []
        done: set[int] = set()
        stack = [(own, False) for own in parts]
        while stack:
            own, ready = stack.pop()
            if ready:
                found.append(own)
            elif own not in done:
                done.add(own)
                stack.append((own, True))
                stack.extend((source, False) for source in parts[own] if source not in done)
        return found[::-1]

    def _make(self, own: int, parts: tuple[int, ...], *, late: bool) -> None:
        way, sources = self._way(own), [self.nodes[part] for part in parts]
        old = self._old(own, way, parts)
        if old is not None:
            given = iter(sources)
            args, kwargs = map_arg((old.args, old.kwargs), lambda node: next(given))
            made = self.new.create_node("call_function", old.target, args, kwargs, name=old.name)
            made.meta = dict(old.meta)
            if not same_inputs(made, old):
                self._values.evaluate(made)
        else:
            target, args = WORDS[way.word].call(way.numbers, sources)
            if target is aten.cat.default and args[1] == 0 and self._are_parameters(sources):
                target, args = BESIDE, (sources,)
            made = self.new.call_function(target, args)
            made.meta = {"phase": "backward" if late else "forward"}
            self._values.evaluate(made)
            if (item := WORDS[way.word].item) is not None:
                several = made
                made = self.new.call_function(operator.getitem, (several, item))
                made.meta = {**several.meta, "val": several.meta["val"][item]}
        self.nodes[own] = made

    def _old(self, own: int, way: Way, parts: tuple[int, ...]) -> fx.Node | None:
        """The node that computed a class this way."""
        at: int | None
        if way.word == "op":
            at = way.numbers[0]
            return self.terms.nodes[at]
        at = self._first.get(own)
        if at is None or self.choice[own] != self.written.get(own):
            return None
        node = self.terms.nodes[at]
        if way.word in _GRADIENTS:  # of one op that makes several: put together again below
            return None
        if way.word != "cat":
            return node
        joined = tuple(self.classes.of_term[self.terms.of_node[source]] for source in sources_of(node))
        return node if joined == parts and not self._are_parameters([self.nodes[p] for p in parts]) else None

    def _are_parameters(self, sources: list[fx.Node]) -> bool:
        names = {entry.node for entry in self.graph.inputs_of("parameter")}
        return all(source.name in names for source in sources)

    def _split(self) -> None:
        """Slices that together are all of a tensor, at once."""
        for source in list(self.new.nodes):
            by_dim: dict[Any, list[fx.Node]] = {}
            for user in source.users:
                if user.target is aten.slice.Tensor and len(user.args) == 4:
                    by_dim.setdefault(user.args[1], []).append(user)
            for dim, parts in by_dim.items():
                bounds: list[tuple[Any, Any, fx.Node]] = [(n.args[2], n.args[3], n) for n in parts]
                bounds.sort(key=lambda entry: (entry[0], entry[1]))
                ends = [0, *(end for _, end, _ in bounds)]
                phases = {node.meta["phase"] for node in parts}
                gapless = [start for start, _, _ in bounds] == ends[:-1]
                if (
                    len(parts) < 2
                    or not gapless
                    or ends[-1] != source.meta["val"].shape[dim]
                    or len(phases) > 1
                ):
                    continue
                sizes = [end - start for start, end, _ in bounds]
                with self.new.inserting_after(source):
                    made = self.new.call_function(aten.split_with_sizes.default, (source, sizes, dim))
                made.meta = {"phase": phases.pop()}
                self._values.evaluate(made)
                for index, (_, _, node) in enumerate(bounds):
                    node.target, node.args = operator.getitem, (made, index)
