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
from torch.fx.node import map_aggregate

from plait.torch_private import pytree
from plait.torch_private.dispatch import without_modes
from plait.torch_private.ops import schema_of
from plait.torch_private.tracing import Sizes, make_fx

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


def row_function(
    function: Callable[..., Sequence[Tensor]],
    parameters: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    states: Sequence[Tensor],
    others: int | None = None,
    out: Sequence[Tensor] | None = None,
) -> RowFunction:
    """Trace `function(parameters, inputs, states)` of one row, which gives new states like `out`.

    `inputs` and `states` are examples for one row and one state; with `others` a row sees so many of each state, in its
    first dim, and makes one of each. Parameters and inputs that can get gradients.
    """
    is_number = [value.requires_grad for value in parameters.values()]
    is_number += [value.is_floating_point() or value.is_complex() for value in (*inputs, *states)]
    made = states if out is None else out
    has_grad = [value.is_floating_point() or value.is_complex() for value in made]
    names, num_inputs = tuple(parameters), len(inputs)

    def joint(given: Sequence[Tensor], grads: Sequence[Tensor]) -> Any:
        def of(*numbers: Tensor) -> Any:
            known = iter(numbers)
            every = [next(known) if number else value for value, number in zip(given, is_number, strict=True)]
            known_parameters = dict(zip(names, every, strict=False))
            rest = every[len(names) :]
            batched = vmap(function, in_dims=(None, 0, 0), randomness="different")
            made = tuple(batched(known_parameters, rest[:num_inputs], rest[num_inputs:]))
            return tuple(value for value, number in zip(made, has_grad, strict=True) if number), made

        numbers = [value for value, number in zip(given, is_number, strict=True) if number]
        if not (numbers and grads):
            return of(*numbers)[1], [torch.zeros_like(value) for value in numbers]
        derived: Any = vjp(of, *numbers, has_aux=True)
        _, back, out = derived
        return out, back(tuple(grads))

    for symbols in (True, False):
        sizes = Sizes(others or 0, symbols=symbols)
        given = [sizes.fake(value) for value in parameters.values()]
        given += [sizes.fake(value, rows=True) for value in inputs]
        given += [sizes.fake(value, rows=True, others=others is not None) for value in states]
        grads = [sizes.fake(value, rows=True) for value, number in zip(made, has_grad, strict=True) if number]
        with without_modes(), sizes.mode:
            traced = _traced(joint, given, grads)
        if sizes.is_open:
            break
    counts = (len(names), num_inputs, len(states), len(grads))
    return _cut(_Cut(traced, sizes, counts), names, is_number, has_grad, others=others is not None)


def _traced(joint: Callable[..., Any], *given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function, without changes in place."""
    try:
        functional: Any = functionalize(joint, remove="mutations")
        return make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*given)
    except RuntimeError as error:
        if "INTERNAL ASSERT" not in str(error):  # torch 2.11 cannot trace through its own functionalize
            raise
    traced = make_fx(joint, tracing_mode="real", _allow_non_fake_inputs=True)(*given)
    for node in list(traced.graph.nodes):
        if (
            node.op == "call_function"
            and schema_of(node.target) is not None
            and schema_of(node.target).is_mutable
        ):
            if node.target is not torch.ops.aten.squeeze_.dims:
                raise ValueError(f"{node.target} changes a tensor in place")
            # Of torch's own rules for batches: nobody else has the tensor that they change the shape of.
            node.target = torch.ops.aten.squeeze.dims
    return traced


class _Cut:
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
            if node in inputs:
                made[node] = graph.create_node("placeholder", node.name, name=node.name)
            elif self.sizes.is_rows(node.meta.get("val")):
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


def _cut(
    cut: _Cut, names: Sequence[str], is_number: Sequence[bool], has_grad: Sequence[bool], *, others: bool
) -> RowFunction:
    parameters, inputs, states, grads = cut.given
    out = cut.out[: len(has_grad)]
    leaves = [leaf for leaf, number in zip((*parameters, *inputs, *states), is_number, strict=True) if number]
    gradients = dict(zip(leaves, cut.out[len(has_grad) :], strict=True))
    reaching = {leaf: gradient for leaf, gradient in gradients.items() if gradient in cut.of_grads}
    passed = [reaching[state] for state in states if state in reaching]
    trained = [(leaf, reaching[leaf]) for leaf in (*parameters, *inputs) if leaf in reaching]

    first, second = cut.ancestors(out), cut.ancestors(passed)
    forward = {node for node in (first | second) if node in cut.of_states and node not in cut.of_grads}
    backward = {node for node in second if node in cut.of_grads}
    cut.level = forward | backward
    late = cut.ancestors(gradient for _, gradient in trained) - cut.level
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
    )


def _is_view(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").split(".")[0] in _VIEWS or node.target is operator.getitem


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
