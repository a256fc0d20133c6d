"""Differentiate a functional forward graph: trace its interpretation together with its backward.

In: a forward graph that returns (total, weight, *extras). Out: a joint graph whose backward nodes know the forward
op that they belong to. Gradients are those of `total * tangent`, where `tangent` is the last input.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.capture.functional import functionalize, mutates
from plait.graph.capture.marks import Marks
from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.ops import OpOverload, schema_of
from plait.torch_private.tracing import make_fx, nodes_so_far


@dataclass(frozen=True, kw_only=True, slots=True)
class Joint:
    """Forward and backward in one graph."""

    graph: fx.Graph
    """Functional aten ops, forward first."""
    total: fx.Node
    """Numerator of the loss."""
    weight: fx.Node
    """Denominator of the loss."""
    extras: tuple[fx.Node, ...]
    """Further outputs of the forward (new buffers)."""
    gradients: dict[str, fx.Node]
    """Parameter name -> gradient; parameters without influence are absent."""


class _Replay(fx.Interpreter):
    """Runs the forward under autograd and remembers which op each autograd node belongs to."""

    def __init__(self, module: fx.GraphModule, marks: Marks) -> None:
        super().__init__(module)
        self.marks = marks
        self.owner: dict[Any, fx.Node] = {}

    def run_node(self, node: fx.Node) -> Any:
        self.marks.at_node(node)
        if node.op != "call_function" or not node.meta.get("grad", True):
            with torch.set_grad_enabled(node.op != "call_function"):
                return super().run_node(node)
        result = super().run_node(node)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._own(leaf.grad_fn, node)
        return result

    def _own(self, grad_fn: Any, node: fx.Node) -> None:
        stack = [grad_fn]
        while stack:
            current = stack.pop()
            if current is None or current in self.owner or type(current).__name__ == "AccumulateGrad":
                continue
            self.owner[current] = node
            current.register_prehook(lambda _grads, node=node: self.marks.at_node(node))
            stack.extend(parent for parent, _ in current.next_functions)


def differentiate(
    forward: fx.GraphModule,
    parameters: list[str],
    trainable: list[str],
    num_extras: int,
    mode: FakeTensorMode,
) -> Joint:
    """Trace forward and backward of `forward`, whose first inputs are `parameters`, with a new last input `tangent`."""
    marks = Marks()
    boundary = [0]
    present: list[str] = []
    wanted = set(trainable)
    with mode:
        inputs = [
            torch.empty_like(node.meta["val"], memory_format=torch.preserve_format)
            for node in forward.graph.nodes
            if node.op == "placeholder"
        ]
        total_dtype = _output_values(forward.graph)[0].meta["val"].dtype
        inputs.append(torch.empty((), dtype=total_dtype))
    for name, tensor in zip(parameters, inputs, strict=False):
        tensor.requires_grad_(name in wanted)

    def run(*flat: Tensor) -> list[Tensor]:
        with torch.enable_grad():
            replay = _Replay(forward, marks)
            outputs = replay.run(*flat[:-1])
            total = outputs[0]
            boundary[0] = nodes_so_far()
            chosen = [
                (name, tensor) for name, tensor in zip(parameters, flat, strict=False) if name in wanted
            ]
            gradients: list[Tensor | None] = [None] * len(chosen)
            if total.requires_grad:
                gradients = list(
                    torch.autograd.grad(
                        total, [t for _, t in chosen], grad_outputs=flat[-1], allow_unused=True
                    )
                )
            found = [(name, g) for (name, _), g in zip(chosen, gradients, strict=True) if g is not None]
            present.extend(name for name, _ in found)
            return [*(value.detach() for value in outputs), *(gradient for _, gradient in found)]

    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        joint = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
    _describe(joint.graph, marks, boundary[0])
    if mutates(joint.graph):  # some of torch's backward formulas fill tensors that they made
        joint = functionalize(joint, inputs, mode)
    _drop_detach(joint.graph)
    _drop_checks(joint.graph)
    joint.graph.eliminate_dead_code()
    values = _output_values(joint.graph)
    extras = values[2 : 2 + num_extras]
    _bake_constants(joint)
    return Joint(
        graph=joint.graph,
        total=values[0],
        weight=values[1],
        extras=tuple(extras),
        gradients=dict(zip(present, values[2 + num_extras :], strict=True)),
    )


def _output_values(graph: fx.Graph) -> list[fx.Node]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    return list(output.args[0])


def _describe(graph: fx.Graph, marks: Marks, boundary: int) -> None:
    for index, node in enumerate(graph.nodes):
        origin = marks.origin_of(index)
        node.meta["phase"] = "backward" if index >= boundary and node.op == "call_function" else "forward"
        node.meta["origin"] = origin.name if origin is not None else ""
        node.meta["module"] = origin.meta.get("module", "") if origin is not None else ""
        node.meta["source"] = origin.meta.get("source", "") if origin is not None else ""


def _drop_detach(graph: fx.Graph) -> None:
    """The joint graph is run without autograd, so detach and alias are the identity."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (
            torch.ops.aten.detach.default,
            torch.ops.aten.alias.default,
        ):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _drop_checks(graph: fx.Graph) -> None:
    """Ops that return nothing only look at what others made, as `torch.linalg.inv` looks for a singular matrix.

    Without them such a matrix gives a loss that is not finite, which ends the run as well.
    """
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, OpOverload) and not schema_of(node.target).returns:
            graph.erase_node(node)


def _bake_constants(module: fx.GraphModule) -> None:
    """Keep the values of constant tensors with their nodes."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.meta["constant"] = getattr(module, str(node.target))
            node.meta.setdefault("val", node.meta["constant"])
