"""The ways through a step that branches on values, as one graph.

In: the step traced under every list of outcomes (`branches.py`). Out: one `Graph` that computes all of them, what they
have in common once, and uses the one that holds (`plait::chosen`). Where the user's code raises, the graph does so too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from plait.errors import CaptureError
from plait.graph.capture.branches import Way, frozen
from plait.graph.graph import Graph, depends_on


def merge(ways: Sequence[Way]) -> Graph:
    """One graph of all ways, the first of which is extended."""
    made = [way for way in ways if way.graph is not None]
    if len(ways) == 1 and ways[0].graph is not None:
        return ways[0].graph
    if not made or made[0].graph is None:
        raise CaptureError(
            f"the model raises whatever its values are: {ways[0].error}",
            fix="mend what the line complains about.",
        )
    return _Merge(made[0].graph).run(ways)


@dataclass(kw_only=True, slots=True)
class _Ends:
    """What a way, or several, give."""

    total: fx.Node
    weight: fx.Node
    buffers: dict[str, fx.Node]
    gradients: dict[str, fx.Node | None]
    flags: tuple[fx.Node, ...]
    """The questions on the way."""


class _Merge:
    def __init__(self, first: Graph) -> None:
        self.first, self.graph = first, first.graph
        self.output = next(node for node in self.graph.nodes if node.op == "output")
        backward = (node for node in self.graph.nodes if node.meta.get("phase") == "backward")
        self.middle = next(backward, self.output)
        self.known: dict[object, fx.Node] = {}
        self.own: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.graph.nodes):
            self.own[node] = node
            if node.op != "output":
                self.known.setdefault(self._key(node, index, self.own), node)

    def run(self, ways: Sequence[Way]) -> Graph:
        ends = [self._take(way) for way in ways]
        left = [entry for entry in ends if entry is not None]
        absent = {name for a in left for b in left for name in a.gradients if name not in b.gradients}
        for entry in left:
            for name in absent.intersection(entry.gradients):
                entry.gradients[name] = self._present(entry.gradients[name])
        result = self._fold(list(zip(ways, ends, strict=True)), 0)
        assert result is not None
        reached = {name: node for name, node in result.gradients.items() if node is not None}
        self.output.args = ((result.total, result.weight, *result.buffers.values(), *reached.values()),)
        self.graph.eliminate_dead_code()
        static = {way.graph.static_weight for way in ways if way.graph is not None}
        sources = dict.fromkeys(source for way in ways for source in way.sources)
        told = dict.fromkeys(note for way in ways if way.graph is not None for note in way.graph.notices)
        made = sum(way.graph is not None for way in ways)
        if made > 1:
            told[
                f"the forward branches on values ({', '.join(sources)}): a step computes all {made} ways "
                "through it, and uses the one that holds."
            ] = None
        return replace(
            self.first,
            total=result.total.name,
            weight=result.weight.name,
            weight_is_early=self._is_early(result.weight),
            static_weight=static.pop() if len(static) == 1 else None,
            gradients={name: node.name for name, node in reached.items()},
            new_buffers={name: node.name for name, node in result.buffers.items()},
            unused=tuple(name for name in self.first.unused if name not in reached),
            conditional=frozenset(absent) | self.first.conditional,
            flags=(),
            notices=tuple(told),
        )

    def _is_early(self, weight: fx.Node) -> bool:
        late = {entry.node for entry in self.first.inputs if entry.kind not in ("batch", "buffer")}
        return not depends_on(weight, late)

    def _key(self, node: fx.Node, index: int, nodes: dict[fx.Node, fx.Node]) -> object:
        if node.op == "placeholder":
            return ("placeholder", index)
        if node.op == "get_attr":
            constant = node.meta["constant"]
            small = isinstance(constant, Tensor) and constant.numel() <= 1024
            return (str(constant.dtype), repr(constant.tolist())) if small else ("constant", id(constant))
        return (node.target, frozen((node.args, node.kwargs), nodes))

    def _take(self, way: Way) -> _Ends | None:
        """The nodes of a way that are not there yet, forward before backward."""
        if way.graph is None:
            return None
        nodes = self.own
        if way.graph is not self.first:
            nodes, origins = {}, dict[str, str]()
            for index, node in enumerate(way.graph.graph.nodes):
                if node.op == "output":
                    continue
                key = self._key(node, index, nodes)
                if key not in self.known:
                    self.known[key] = self._copy(node, nodes, origins)
                nodes[node] = self.known[key]
                origins[node.name] = nodes[node].name
        named = {node.name: made for node, made in nodes.items()}
        graph = way.graph
        return _Ends(
            total=named[graph.total],
            weight=named[graph.weight],
            buffers={name: named[node] for name, node in graph.new_buffers.items()},
            gradients={name: named[node] for name, node in graph.gradients.items()},
            flags=tuple(named[name] for name in graph.flags),
        )

    def _copy(self, node: fx.Node, nodes: dict[fx.Node, fx.Node], origins: dict[str, str]) -> fx.Node:
        before = self.output if node.meta.get("phase") == "backward" else self.middle
        with self.graph.inserting_before(before):
            made = self.graph.node_copy(node, lambda source: nodes[source])
        made.meta = dict(node.meta)
        if node.op == "get_attr":
            made.target = f"{node.target}_{made.name}"
        origin = node.meta.get("origin", "")
        made.meta["origin"] = made.name if origin == node.name else origins.get(origin, origin)
        return made

    def _fold(self, entries: list[tuple[Way, _Ends | None]], depth: int) -> _Ends | None:
        """What holds, of ways that are alike in their first `depth` outcomes; None: the user's code raises."""
        if len(entries) == 1:
            return entries[0][1]
        yes = [entry for entry in entries if entry[0].outcomes[depth]]
        no = [entry for entry in entries if not entry[0].outcomes[depth]]
        first, second = self._fold(yes, depth + 1), self._fold(no, depth + 1)
        flags = next((ends.flags for _, ends in entries if ends is not None), None)
        if flags is None or (first is None and second is None):
            return None
        flag = flags[depth]
        if first is None or second is None:
            left = first if first is not None else second
            assert left is not None
            error = next(way.error for way, ends in (yes if first is None else no) if ends is None)
            left.total = self._node(left.total, torch.ops.plait.unless.default, flag, first is None, error)
            return left
        given = {entry.name: self._input(entry.node) for entry in self.first.held}
        buffers = {
            name: self._chosen(
                flag, first.buffers.get(name, given[name]), second.buffers.get(name, given[name])
            )
            for name in {**first.buffers, **second.buffers}
        }
        return _Ends(
            total=self._both(flag, first.total, second.total),
            weight=self._both(flag, first.weight, second.weight),
            buffers={name: node for name, node in buffers.items() if node is not None},
            gradients={
                name: self._chosen(flag, first.gradients.get(name), second.gradients.get(name))
                for name in {**first.gradients, **second.gradients}
            },
            flags=flags,
        )

    def _present(self, gradient: fx.Node | None) -> fx.Node:
        assert gradient is not None
        key = ("present", gradient)
        if key not in self.known:
            self.known[key] = self._node(gradient, torch.ops.plait.present.default)
        return self.known[key]

    def _input(self, name: str) -> fx.Node:
        node: fx.Node = next(node for node in self.graph.nodes if node.name == name)
        return node

    def _both(self, flag: fx.Node, yes: fx.Node, no: fx.Node) -> fx.Node:
        made = self._chosen(flag, yes, no)
        assert made is not None
        return made

    def _chosen(self, flag: fx.Node, yes: fx.Node | None, no: fx.Node | None) -> fx.Node | None:
        if yes is no:
            return yes
        like = yes if yes is not None else no
        assert like is not None
        return self._node(like, torch.ops.plait.chosen.default, flag, yes, no, swapped=True)

    def _node(self, like: fx.Node, target: Any, *args: Any, swapped: bool = False) -> fx.Node:
        """A node that gives something like another one, at the end of its phase."""
        before = self.output if like.meta.get("phase") == "backward" else self.middle
        with self.graph.inserting_before(before):
            made = self.graph.call_function(target, args if swapped else (like, *args))
        made.meta = dict(like.meta)
        if like.meta.get("phase") != "backward":
            made.meta["origin"] = made.name
        return made
