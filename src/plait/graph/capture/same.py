"""Whether two traces of a step compute the same.

In: a traced step, tensors that its code has left behind, and values of those that an earlier one left. Out: its
`Meaning`: keys that are equal where two steps compute the same, and values of what was left behind and depends on
nothing. Dead code does not count, and what depends on nothing is compared by value: a table that one step makes and the
next one finds is the same table.
"""

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.capture.branches import frozen
from plait.graph.capture.trace import Traced
from plait.graph.rewrite.functional import functionalize
from plait.torch_private.dispatch import without_modes
from plait.torch_private.fake import FakeTensor, FakeTensorMode

_LARGEST_BYTES = 1 << 26
"""Of a tensor that depends on nothing and is made to be compared."""

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Ops that give what they are given."""


class NoMeaningError(Exception):
    """A step cannot be written without writes in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Meaning:
    """What a traced step computes."""

    keys: tuple[object, ...]
    """Of its results and of all that it writes to its inputs."""
    left: Mapping[int, Tensor]
    """By id of a tensor that was left behind and depends on nothing: its values."""


def meaning_of(
    traced: Traced, left: Sequence[Tensor], known: Mapping[int, Tensor], mode: FakeTensorMode
) -> Meaning:
    """What a step computes that leaves `left` behind and finds tensors of the values `known`, by id."""
    module, found, nodes = _prepared(traced, left, known)
    try:
        functional = functionalize(module, mode)
    except Exception as error:  # it writes to a tensor that neither it nor the model holds
        raise NoMeaningError from error
    keys, values = _evaluated(functional, [known[index] for index in found])
    return Meaning(
        keys=keys[: len(keys) - len(nodes)],
        left={
            index: value
            for index, value in zip(nodes, values[len(values) - len(nodes) :], strict=True)
            if value is not None
        },
    )


def _prepared(
    traced: Traced, left: Sequence[Tensor], known: Mapping[int, Tensor]
) -> tuple[fx.GraphModule, list[int], list[int]]:
    """A copy of the step that takes what it finds as inputs, and returns what it leaves; ids of both."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(traced.module.graph, copies)
    module = fx.GraphModule(traced.module, graph)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    inputs: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(traced.module, str(node.target))
        if id(value) not in known:
            continue
        if id(value) not in inputs:
            with graph.inserting_after(last):
                last = inputs[id(value)] = graph.placeholder(f"found_{len(inputs)}")
            last.meta["val"] = value
        node.replace_all_uses_with(inputs[id(value)])
        graph.erase_node(node)
    made = {id(t): node for t in left if (node := traced.node_of(t)) is not None and node in copies}
    made = {index: copies[node] for index, node in made.items()}
    made |= {id(t): inputs[id(t)] for t in left if id(t) in inputs}
    graph.output((*result, *made.values()))
    return module, list(inputs), list(made)


def _evaluated(
    module: fx.GraphModule, found: Sequence[Tensor]
) -> tuple[tuple[object, ...], list[Tensor | None]]:
    """Keys of the results and of writes to inputs; values of those results that depend on nothing."""
    graph = module.graph
    placeholders = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders[len(placeholders) - len(found) :], found, strict=True))
    keys: dict[fx.Node, object] = {}
    output = next(iter(graph.find_nodes(op="output")))
    writes = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]
    live = _reaching([output, *writes])
    num_draws = 0
    with without_modes(), torch.no_grad():
        for node in graph.nodes:
            if node not in live or node is output:
                continue
            if node.op == "placeholder":
                keys[node] = _key_of(values[node]) if node in values else ("input", placeholders.index(node))
            elif node.op == "get_attr":
                value = getattr(module, str(node.target))
                if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
                    values[node] = value
                keys[node] = _key_of(values[node]) if node in values else ("held", str(value))
            else:
                drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                num_draws += drawn
                if not drawn and _compute(node, values):
                    keys[node] = _key_of(values[node])
                elif node.target in _SAME:
                    keys[node] = keys[node.args[0]]
                else:
                    given = frozen((node.args, node.kwargs), keys)
                    keys[node] = hash((str(node.target), num_draws if drawn else 0, given))
    results: Any = output.args[0]
    of_results = tuple(frozen(result, keys) for result in results)
    of_writes = tuple(keys[node] for node in writes)
    values_of = [values.get(result) if isinstance(result, fx.Node) else None for result in results]
    written = {node.args[0] for node in writes}
    values_of = [
        None if result in written else value for result, value in zip(results, values_of, strict=True)
    ]
    return (of_writes, *of_results), values_of


def _reaching(ends: Sequence[fx.Node]) -> set[fx.Node]:
    live, stack = set(ends), list(ends)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in live:
                live.add(source)
                stack.append(source)
    return live


def _compute(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    """Whether a node depends on nothing; its value is then among `values`."""
    if any(source not in values for source in node.all_input_nodes):
        return False
    made = node.meta.get("val")
    if isinstance(made, Tensor) and made.nbytes > _LARGEST_BYTES:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.target is not operator.getitem and "plait" in str(node.target):
        return False
    try:
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return False
    return True


def _key_of(value: Any) -> object:
    """Of a value that is compared as it is."""
    if isinstance(value, Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return (tuple(value.shape), str(value.dtype), hashlib.blake2b(raw).digest())
    if isinstance(value, tuple | list):
        return tuple(_key_of(entry) for entry in value)
    return repr(value)
