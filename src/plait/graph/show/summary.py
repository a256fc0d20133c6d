"""What a captured step holds and costs, as numbers for people and as a list for machines.

In: a `Graph`. Out: a `Summary`, or one JSON object with every op. FLOPs are torch's own counts (2 per multiply-add; 0
for ops that `torch.utils.flop_counter` does not count). It never runs anything, and never guesses what the optimizer
keeps: the update phase is one entry per trained parameter, with the bytes of the parameter and of its gradient.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from plait.graph.cost import node_flops, value_bytes
from plait.graph.graph import Graph
from plait.graph.op_family import family, is_view
from plait.graph.show.module_costs import ModuleCost, module_costs
from plait.graph.storage import is_item, owner_of
from plait.torch_private.ops import OpOverload

NUM_LARGEST = 10
"""How many of the largest activations a summary names."""

Root = tuple[fx.Node, int | None]
"""What owns a value's memory: a node, and which of its results where it has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """A value of the forward that is kept for the backward."""

    name: str
    """Of the op that made it."""
    target: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    source: str
    """file:line of the user's that made it; empty where torch's own modules call each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The optimizer's work on one parameter; what state it keeps is the optimizer's own."""

    parameter: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    parameter_bytes: int
    gradient_bytes: int
    gradient: str
    """Node of the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One micro-step at a glance."""

    num_samples: int
    """Samples in the micro-batch that was captured."""
    precision: str
    num_parameters: int
    """Elements of all parameters; a tied one counts once."""
    num_trainable: int
    """Of these, in parameters that want a gradient."""
    parameter_bytes: int
    num_ops: dict[str, int]
    """Ops by phase; picking one of an op's results is none."""
    families: dict[str, int]
    """Ops of forward and backward by kind, most frequent first."""
    forward_flops: int
    backward_flops: int
    activation_bytes: int
    """Memory of forward values that the backward reads. Views count with what they look into, once; parameters, buffers
    and the batch are not counted, as they are there anyway."""
    largest_activations: tuple[Activation, ...]
    """Largest first."""
    modules: tuple[ModuleCost, ...]
    """Costliest first; equal siblings (the layers of a transformer) are one entry."""
    updates: tuple[Update, ...]
    """One per parameter that has a gradient."""
    notices: tuple[str, ...]
    unused: tuple[str, ...]
    """Trainable parameters that the loss does not depend on."""
    tied: dict[str, str]
    """Tied name -> the name under which the parameter is counted."""


def summarize(graph: Graph) -> Summary:
    """Everything that the graph says without being run."""
    ops = [node for node in graph.ops() if node.target is not operator.getitem]
    flops = {node: node_flops(node) for node in ops}
    kept = kept_for_backward(graph)
    nodes = graph.nodes()
    parameters = {entry.name: nodes[entry.node].meta["val"] for entry in graph.inputs_of("parameter")}
    trainable = {entry.name for entry in graph.inputs_of("parameter") if entry.trainable}
    updates = tuple(_updates(graph))
    phases = Counter(str(node.meta["phase"]) for node in ops)
    return Summary(
        num_samples=graph.num_samples,
        precision=graph.precision,
        num_parameters=sum(value.numel() for value in parameters.values()),
        num_trainable=sum(value.numel() for name, value in parameters.items() if name in trainable),
        parameter_bytes=sum(value_bytes(value) for value in parameters.values()),
        num_ops={"forward": phases["forward"], "backward": phases["backward"], "update": len(updates)},
        families=dict(Counter(family(node.target) for node in ops).most_common()),
        forward_flops=_flops_of(flops, "forward"),
        backward_flops=_flops_of(flops, "backward"),
        activation_bytes=sum(kept.values()),
        largest_activations=_largest(kept),
        modules=module_costs(
            flops=flops,
            kept=_by_node(kept),
            parameters=parameters,
        ),
        updates=updates,
        notices=graph.notices,
        unused=graph.unused,
        tied=dict(graph.aliases),
    )


def to_json(graph: Graph) -> dict[str, Any]:
    """The whole graph in plain lists and dicts: inputs, ops in execution order (updates last), outputs."""
    nodes = graph.nodes()
    return {
        "num_samples": graph.num_samples,
        "precision": graph.precision,
        "inputs": [
            {"name": entry.node, "kind": entry.kind, "of": entry.name, "trainable": entry.trainable}
            | _described(nodes[entry.node].meta["val"])
            for entry in graph.inputs
        ],
        "ops": [_op(node) for node in graph.ops()] + [_update_op(update) for update in _updates(graph)],
        "outputs": {
            "total": graph.total,
            "weight": graph.weight,
            "gradients": graph.gradients,
            "new_buffers": graph.new_buffers,
        },
        "tied": graph.aliases,
        "unused": list(graph.unused),
        "notices": list(graph.notices),
    }


def kept_for_backward(graph: Graph) -> dict[Root, int]:
    """Bytes of each piece of memory that the forward fills and the backward reads."""
    kept: dict[Root, int] = {}
    for node in graph.ops():
        if node.meta["phase"] != "forward" or isinstance(node.meta["val"], tuple | list):
            continue
        if any(user.meta.get("phase") == "backward" for user in node.users if user.op == "call_function"):
            root = memory_root(node)
            if root[0].op == "call_function":
                kept[root] = value_bytes(_root_value(root))
    return kept


def memory_root(node: fx.Node) -> Root:
    """The op (and which of its results) whose memory this node's value lies in."""
    owner = owner_of(node)
    if not is_item(owner):
        return owner, None
    made, index = owner.args
    return made, index  # type: ignore[return-value]


def _root_value(root: Root) -> Any:
    value = root[0].meta["val"]
    return value if root[1] is None else value[root[1]]


def _by_node(kept: dict[Root, int]) -> dict[fx.Node, int]:
    """The same bytes with all results of one op together."""
    together: Counter[fx.Node] = Counter()
    for (node, _), num_bytes in kept.items():
        together[node] += num_bytes
    return together


def _flops_of(flops: dict[fx.Node, int], phase: Literal["forward", "backward"]) -> int:
    return sum(count for node, count in flops.items() if node.meta["phase"] == phase)


def _largest(kept: dict[Root, int]) -> tuple[Activation, ...]:
    ranked = sorted(kept.items(), key=lambda item: item[1], reverse=True)[:NUM_LARGEST]
    found = []
    for root, num_bytes in ranked:
        node, value = root[0], _root_value(root)
        found.append(
            Activation(
                name=node.name,
                target=_target_name(node),
                module=node.meta["module"],
                shape=tuple(value.shape),
                dtype=_dtype_name(value),
                num_bytes=num_bytes,
                source=node.meta["source"],
            )
        )
    return tuple(found)


def _updates(graph: Graph) -> Iterator[Update]:
    nodes = graph.nodes()
    for entry in graph.inputs_of("parameter"):
        gradient = graph.gradients.get(entry.name)
        if gradient is None:
            continue
        value = nodes[entry.node].meta["val"]
        yield Update(
            parameter=entry.name,
            module=entry.name.rpartition(".")[0],
            shape=tuple(value.shape),
            dtype=_dtype_name(value),
            parameter_bytes=value_bytes(value),
            gradient_bytes=value_bytes(nodes[gradient].meta["val"]),
            gradient=gradient,
        )


def _op(node: fx.Node) -> dict[str, Any]:
    view = is_view(node.target) or node.target is operator.getitem
    described = _described(node.meta["val"])
    return {
        "name": node.name,
        "target": _target_name(node),
        "family": family(node.target),
        "phase": node.meta["phase"],
        "module": node.meta["module"],
        "origin": node.meta["origin"],
        "source": node.meta["source"],
        **described,
        "flops": node_flops(node),
        "bytes": 0 if view else described["bytes"],
        "inputs": [source.name for source in node.all_input_nodes],
    }


def _update_op(update: Update) -> dict[str, Any]:
    return {
        "name": f"update:{update.parameter}",
        "target": "optimizer",
        "family": "update",
        "phase": "update",
        "module": update.module,
        "origin": "",
        "source": "",
        "shapes": [list(update.shape)],
        "dtypes": [update.dtype],
        "flops": 0,
        "bytes": update.parameter_bytes + update.gradient_bytes,
        "state_bytes": None,
        "inputs": [update.gradient],
    }


def _described(value: Any) -> dict[str, Any]:
    leaves = value if isinstance(value, tuple | list) else [value]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {
        "shapes": [list(tensor.shape) for tensor in tensors],
        "dtypes": [_dtype_name(tensor) for tensor in tensors],
        "bytes": value_bytes(tensors),
    }


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))
