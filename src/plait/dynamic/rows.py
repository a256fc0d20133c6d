"""A function of one row, as graphs over many rows at once.

In: a function of one row (parameters, inputs of its own, states of others), an example of each. Out: four graphs: what
needs no state, for all rows at once; the forward and the backward of the rows of one level; and, for all rows at once
again, what only the gradients of parameters and inputs need. So every product with a weight that can wait is one
product. Rows never see each other: they are batched by `vmap`, and a gradient of a parameter is a sum over rows.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize, vjp, vmap

from plait.torch_private import pytree
from plait.torch_private.tracing import Sizes, make_fx

ROWS = "num_rows"
"""The input of every graph that says how many rows it gets."""
_VIEWS = (
    *("t", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "slice", "transpose", "permute"),
    *("expand", "split", "split_with_sizes", "detach", "alias", "unbind"),
)
"""Ops that copy nothing: made again where they are needed rather than kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One of the graphs."""

    run: Callable[..., tuple[Tensor, ...]]
    """Takes the number of rows, then `inputs`; gives `outputs`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFunction:
    """The graphs of a function of one row. Values have the names of the traced graph."""

    before: Part
    """All rows, before any level: what needs neither states nor gradients."""
    forward: Part
    """The rows of a level. Outputs: the row's new states first, then what the backward keeps."""
    backward: Part
    """The rows of a level. Outputs: gradients of the states first, then what `after` keeps."""
    after: Part
    """All rows, after all levels. Outputs: gradients of parameters, then of inputs, in the order of `trained`."""
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    states: tuple[str, ...]
    grads: tuple[str, ...]
    out: tuple[str, ...]
    """The new states: names of `before` or `forward`."""
    passed: tuple[str | None, ...]
    """The gradient of each state; None: it has none."""
    trained: tuple[tuple[str, str], ...]
    """(parameter or input, its gradient), for all that have one."""
    by_row: frozenset[str]
    """Values with one entry for each row, in their first dim."""
    fits: Callable[[int], bool]
    """Whether it serves rows that see so many others."""


def row_function(
    function: Callable[..., Sequence[Tensor]],
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    others: int,
) -> RowFunction:
    """Trace `function(parameters, inputs, states of others)` of one row, which gives its own new states.

    `inputs` and `states` are examples for one row and one state. Parameters that require it get gradients.
    """
    trained = {name for name, value in parameters.items() if value.requires_grad}
    numbered = [value.is_floating_point() for value in inputs]

    def joint(parameters: Any, inputs: Any, states: Any, grads: Any) -> Any:
        def of(floats: Any, numbers: Any, states: Any) -> Any:
            given = iter(numbers)
            own = [next(given) if is_float else value for value, is_float in zip(inputs, numbered, strict=True)]
            batched = vmap(function, in_dims=(None, 0, 0), randomness="different")
            return tuple(batched({**parameters, **floats}, own, states))

        floats = {name: value for name, value in parameters.items() if name in trained}
        numbers = [value for value, is_float in zip(inputs, numbered, strict=True) if is_float]
        out, back = vjp(of, floats, numbers, states)
        return out, back(grads)

    sizes = Sizes(others)
    known = {name: sizes.fake(value) for name, value in parameters.items()}
    own = [sizes.fake(value, rows=True) for value in inputs]
    given = [sizes.fake(value, rows=True, others=True) for value in states]
    grads = tuple(sizes.fake(value, rows=True) for value in states)
    with sizes.mode:
        functional: Any = functionalize(joint, remove="mutations")
        traced = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(known, own, given, grads)
    counts = (len(known), len(own), len(given), len(given))
    return _cut(traced, sizes, counts, [*(name in trained for name in known), *numbered])


class _Cut:
    """Cuts a joint graph in four. A value that a graph needs of an earlier one is handed over, or made again."""

    def __init__(self, traced: fx.GraphModule, sizes: Sizes, counts: Sequence[int]) -> None:
        self._traced, self._sizes = traced, sizes
        self._nodes: list[fx.Node] = list(traced.graph.nodes)
        placed = iter([node for node in self._nodes if node.op == "placeholder"])
        self.given = [[next(placed) for _ in range(count)] for count in counts]
        self.out: list[fx.Node] = pytree.tree_leaves(traced.graph.output_node().args)
        self.of_states, self.of_grads = (self._reached(given) for given in self.given[2:])
        self.level: set[fx.Node] = set()
        """Nodes of the forward and backward of a level."""

    def ancestors(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return found

    def _reached(self, given: Iterable[fx.Node]) -> set[fx.Node]:
        found = set(given)
        for node in self._nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def part(self, members: set[fx.Node], wanted: Sequence[fx.Node], *, late: bool = False) -> Part:
        """The graph that makes `wanted` of `members`; `late` ones are given values of all rows."""
        graph = fx.Graph()
        number = graph.placeholder(ROWS)
        made: dict[fx.Node, fx.Node] = {}
        inputs: set[fx.Node] = set()
        needed = self._needed(members, wanted, late, inputs)
        for node in needed:
            if node in inputs:
                made[node] = graph.create_node("placeholder", node.name, name=node.name)
            elif self._sizes.is_rows(node.meta.get("val")):
                made[node] = number
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in wanted))
        module = fx.GraphModule(self._traced, graph)
        return Part(run=module.forward, inputs=_names(node for node in needed if node in inputs), outputs=_names(wanted))

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
            elif not self._sizes.is_rows(node.meta.get("val")):
                todo += node.all_input_nodes
        return [node for node in self._nodes if node in needed]

    def _is_kept(self, node: fx.Node, late: bool) -> bool:
        value = node.meta.get("val")
        if node.op == "get_attr" or not isinstance(value, Tensor):
            return False
        if node in self.level and not late:
            return True
        return (self.is_by_row(node) or not any(map(self._sizes.has_rows, value.shape))) and not (late and _is_view(node))

    def is_by_row(self, node: fx.Node) -> bool:
        """Whether a value has one entry for each row, in its first dim."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.dim():
            return False
        return self._sizes.is_rows(value.shape[0]) and not any(map(self._sizes.has_rows, value.shape[1:]))


def _cut(traced: fx.GraphModule, sizes: Sizes, counts: Sequence[int], floats: Sequence[bool]) -> RowFunction:
    traced.graph.eliminate_dead_code()
    cut = _Cut(traced, sizes, counts)
    parameters, inputs, states, grads = cut.given
    out = cut.out[: len(states)]
    leaves = [leaf for leaf, is_float in zip((*parameters, *inputs), floats, strict=True) if is_float]
    gradients = dict(zip((*leaves, *states), cut.out[len(states) :], strict=True))
    reaching = {leaf: gradient for leaf, gradient in gradients.items() if gradient in cut.of_grads}
    passed = [reaching[state] for state in states if state in reaching]
    trained = [(leaf, reaching[leaf]) for leaf in leaves if leaf in reaching]

    first, second = cut.ancestors(out), cut.ancestors(passed)
    forward = {node for node in (first | second) if node in cut.of_states and node not in cut.of_grads}
    backward = {node for node in second if node in cut.of_grads}
    cut.level = forward | backward
    late = cut.ancestors(gradient for _, gradient in trained) - cut.level
    late_only = {node for node in late if node in cut.of_states or node in cut.of_grads}
    early = (first | second | late) - cut.level - late_only

    by_name = {node.name: node for node in traced.graph.nodes}
    after = cut.part(late_only, [gradient for _, gradient in trained], late=True)
    kept = [by_name[name] for name in after.inputs if by_name[name] in backward]
    behind = cut.part(backward, [*passed, *kept])
    asked = [by_name[name] for name in dict.fromkeys((*behind.inputs, *after.inputs))]
    of_level = [node for node in out if node in forward]
    ahead = cut.part(forward, [*of_level, *(n for n in asked if n in forward and n.op != "placeholder")])
    asked = list(dict.fromkeys((*(by_name[name] for name in ahead.inputs), *asked, *out)))
    before = cut.part(early, [node for node in asked if node in early and node.op != "placeholder"], late=False)
    return RowFunction(
        before=before,
        forward=ahead,
        backward=behind,
        after=after,
        parameters=_names(parameters),
        inputs=_names(inputs),
        states=_names(states),
        grads=_names(grads),
        out=_names(out),
        passed=tuple(reaching[state].name if state in reaching else None for state in states),
        trained=tuple((leaf.name, gradient.name) for leaf, gradient in trained),
        by_row=frozenset(node.name for node in traced.graph.nodes if cut.is_by_row(node)),
        fits=sizes.fits,
    )


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _VIEWS or node.target is operator.getitem


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
