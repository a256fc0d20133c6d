"""A traced function of one row, cut into four graphs over many rows.

In: the joint graph of one row, forward and backward. Out: a `RowFunction`. What needs no state is computed for all rows
at once, and so is what only gradients of weights need; the rest goes level by level.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from plait.nodes import ancestors
from plait.torch_private import pytree
from plait.torch_private.tracing import Sizes

ROWS = "num_rows"
"""The input of every graph that says how many rows it gets."""
_VIEWS = (
    *(
        "t",
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "select",
        "slice",
        "transpose",
        "permute",
    ),
    *("expand", "split", "split_with_sizes", "detach", "alias", "unbind"),
)
"""Ops that copy nothing: made again where they are needed rather than kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGraph:
    """One of the graphs."""

    run: Callable[..., tuple[Tensor, ...]]
    """Takes the number of rows, then `inputs`; gives `outputs`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFunction:
    """The graphs of a function of one row. Values have the names of the traced graph."""

    before: RowGraph
    """All rows, before any level: what needs neither states nor gradients."""
    forward: RowGraph
    """The rows of a level. Outputs: the row's new states first, then what the backward keeps."""
    backward: RowGraph
    """The rows of a level. Outputs: gradients of the states first, then what `after` keeps."""
    after: RowGraph
    """All rows, after all levels. Outputs: gradients of parameters, then of inputs, in the order of `trained`."""
    parameters: Mapping[str, str]
    """The value that stands for each parameter."""
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    grads: tuple[str | None, ...]
    """The gradient of each new state; None: it can have none."""
    out: tuple[str, ...]
    """The new states: names of `before` or `forward`."""
    passed: tuple[str | None, ...]
    """The gradient of each state; None: it has none."""
    trained: tuple[tuple[str, str], ...]
    """(parameter or input, its gradient), for all that have one."""
    by_row: frozenset[str]
    """Values with one entry for each row, in their first dim."""
    others: bool
    """Whether a row sees several of each state, in the first dim."""
    fits: Callable[[int], bool]
    """Whether it serves rows that see so many others."""
    is_random: bool
    """Whether it draws random numbers, for each row its own."""


class Cut:
    """Cuts a joint graph in four. A value that a graph needs of an earlier one is handed over, or made again."""

    def __init__(self, traced: fx.GraphModule, sizes: Sizes, counts: Sequence[int]) -> None:
        traced.graph.eliminate_dead_code()
        self._traced, self.sizes = traced, sizes
        self.nodes: list[fx.Node] = list(traced.graph.nodes)
        placed = iter([node for node in self.nodes if node.op == "placeholder"])
        self.given = [[next(placed) for _ in range(count)] for count in counts]
        self.out: list[fx.Node] = pytree.tree_leaves(traced.graph.output_node().args)
        self.of_states, self.of_grads = (self._reached(given) for given in self.given[2:])
        self.level: set[fx.Node] = set()
        """Nodes of the forward and backward of a level."""

    def _reached(self, given: Iterable[fx.Node]) -> set[fx.Node]:
        found = set(given)
        for node in self.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def part(self, members: set[fx.Node], wanted: Sequence[fx.Node], *, late: bool = False) -> RowGraph:
        """The graph that makes `wanted` of `members`; `late` ones are given values of all rows."""
        graph = fx.Graph()
        number = graph.placeholder(ROWS)
        made: dict[fx.Node, fx.Node] = {}
        inputs: set[fx.Node] = set()
        needed = self._needed(members, wanted, late, inputs)
        for node in needed:
            if (
                node in inputs
            ):  # all of them first: a node that is made in between may not take the name of one
                made[node] = graph.create_node("placeholder", node.name, name=node.name)
        for node in needed:
            if node in inputs:
                continue
            if self.sizes.is_rows(node.meta.get("val")):
                made[node] = number
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
                made[node].args = map_aggregate(made[node].args, self._counted(graph, number, made[node]))
        graph.output(tuple(made[node] for node in wanted))
        module = fx.GraphModule(self._traced, graph)
        return RowGraph(
            run=module.forward,
            inputs=_names(node for node in needed if node in inputs),
            outputs=_names(wanted),
        )

    def _counted(self, graph: fx.Graph, number: fx.Node, node: fx.Node) -> Callable[[Any], Any]:
        """Numbers that are so many times the rows as what they are."""

        def counted(item: Any) -> Any:
            if not (times := self.sizes.times_rows(item)):
                return item
            with graph.inserting_before(node):
                return number if times == 1 else graph.call_function(operator.mul, (number, times))

        return counted

    def _needed(
        self, members: set[fx.Node], wanted: Sequence[fx.Node], late: bool, inputs: set[fx.Node]
    ) -> list[fx.Node]:
        needed: set[fx.Node] = set()
        todo = list(wanted)
        while todo:
            node = todo.pop()
            if node in needed:
                continue
            needed.add(node)
            if node.op == "placeholder" or (node not in members and self._is_kept(node, late)):
                inputs.add(node)
            elif not self.sizes.is_rows(node.meta.get("val")):
                todo += node.all_input_nodes
        return [node for node in self.nodes if node in needed]

    def _is_kept(self, node: fx.Node, late: bool) -> bool:
        value = node.meta.get("val")
        if node.op == "get_attr" or not isinstance(value, Tensor):
            return False
        if node in self.level and not late:
            return True
        return (self.is_by_row(node) or not any(map(self.sizes.has_rows, value.shape))) and not (
            late and _is_view(node)
        )

    def is_by_row(self, node: fx.Node) -> bool:
        """Whether a value has one entry for each row, in its first dim."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dim():
            return False
        return self.sizes.is_rows(value.shape[0]) and not any(map(self.sizes.has_rows, value.shape[1:]))


def cut_graphs(
    cut: Cut, names: Sequence[str], is_number: Sequence[bool], has_grad: Sequence[bool], *, others: bool
) -> RowFunction:
    parameters, inputs, states, grads = cut.given
    out = cut.out[: len(has_grad)]
    leaves = [leaf for leaf, number in zip((*parameters, *inputs, *states), is_number, strict=True) if number]
    gradients = dict(zip(leaves, cut.out[len(has_grad) :], strict=True))
    reaching = {leaf: gradient for leaf, gradient in gradients.items() if gradient in cut.of_grads}
    passed = [reaching[state] for state in states if state in reaching]
    trained = [(leaf, reaching[leaf]) for leaf in (*parameters, *inputs) if leaf in reaching]

    first, second = ancestors(out), ancestors(passed)
    forward = {node for node in (first | second) if node in cut.of_states and node not in cut.of_grads}
    backward = {node for node in second if node in cut.of_grads}
    cut.level = forward | backward
    late = ancestors(gradient for _, gradient in trained) - cut.level
    late_only = {node for node in late if node in cut.of_states or node in cut.of_grads}
    early = (first | second | late) - cut.level - late_only

    given = iter(grads)
    by_name = {node.name: node for node in cut.nodes}
    after = cut.part(late_only, [gradient for _, gradient in trained], late=True)
    kept = [by_name[name] for name in after.inputs if by_name[name] in backward]
    behind = cut.part(backward, [*passed, *kept])
    asked = [by_name[name] for name in dict.fromkeys((*behind.inputs, *after.inputs))]
    of_level = [node for node in out if node in forward]
    ahead = cut.part(forward, [*of_level, *(n for n in asked if n in forward and n.op != "placeholder")])
    asked = list(dict.fromkeys((*(by_name[name] for name in ahead.inputs), *asked, *out)))
    before = cut.part(
        early, [node for node in asked if node in early and node.op != "placeholder"], late=False
    )
    return RowFunction(
        before=before,
        forward=ahead,
        backward=behind,
        after=after,
        parameters=dict(zip(names, _names(parameters), strict=True)),
        inputs=_names(inputs),
        states=_names(states),
        grads=tuple(next(given).name if number else None for number in has_grad),
        out=_names(out),
        passed=tuple(reaching[state].name if state in reaching else None for state in states),
        trained=tuple((leaf.name, gradient.name) for leaf, gradient in trained),
        by_row=frozenset(node.name for node in cut.nodes if cut.is_by_row(node)),
        others=others,
        fits=cut.sizes.fits,
        is_random=any(
            torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in cut.nodes
        ),
    )


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _VIEWS or node.target is operator.getitem


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
