"""The value that says what one micro-step computes.

In: what capture found. Out: a frozen `Graph`: a flat, functional aten graph of forward, loss and backward on the
*global* micro-batch, with the names of everything that enters and leaves it. It holds no real tensor.

Every node's `meta` carries `val` (a fake tensor), `phase` ("forward" or "backward"), `module` (the path of the module
that ran it, or that of the forward op it differentiates), `origin` (that forward op's name) and `source` (file:line).
"""

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from plait.job.batch import Objects
from plait.nodes import ancestors
from plait.torch_private import pytree

InputKind = Literal["parameter", "buffer", "batch", "key", "tangent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One thing that enters the graph."""

    kind: InputKind
    name: str
    """The user's own name for a parameter or buffer, the path of a batch leaf."""
    node: str
    """Name of the placeholder."""
    trainable: bool = False
    """Whether a gradient is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """How a batch of any nesting maps to the tensors that enter the graph."""

    spec: pytree.TreeSpec
    """The nesting."""
    is_tensor: tuple[bool, ...]
    """For each leaf: whether it is a tensor (enters the graph) or a constant (baked in)."""
    has_samples: tuple[bool, ...]
    """For each tensor leaf: whether dim 0 counts samples."""

    def tensors(self, batch: Any) -> list[torch.Tensor]:
        """The tensor leaves of one batch, in the order of the graph's inputs."""
        return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]

    def rows(self, batch: Any, start: int, count: int) -> Any:
        """`count` samples of a batch from `start` on."""
        leaves, spec = pytree.tree_flatten(batch)
        counts = iter(self.has_samples)
        cut = [
            leaf[start : start + count]
            if isinstance(leaf, Objects) or (isinstance(leaf, torch.Tensor) and next(counts))
            else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(cut, spec)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """One micro-step: (parameters, buffers, batch, key, tangent) -> (total, weight, gradients, new buffers)."""

    graph: fx.Graph
    """The ops, in execution order; the output node returns a flat tuple in the order of `outputs`."""
    inputs: tuple[Input, ...]
    """One per placeholder, in order."""
    batch: BatchLayout
    """How to take a user's batch apart."""
    num_samples: int
    """Samples in the micro-batch that was captured."""
    total: str
    """Node whose sum over ranks and micro-batches is the numerator of the loss."""
    weight: str
    """Node whose sum is the denominator; it depends on the batch alone when `weight_is_early`."""
    weight_is_early: bool
    """Whether the weight can be computed before the forward, from the batch alone."""
    static_weight: float | None
    """The weight as a number where it is a constant of the shape."""
    weight_is_shared: bool = False
    """Whether the weight is a constant that ranks of `data` add up, each by its share of the samples."""
    gradients: dict[str, str]
    """Parameter name -> node of its gradient (of total * tangent); unused parameters are absent."""
    new_buffers: dict[str, str]
    """Buffer name -> node of its value after the step; unchanged buffers are absent.

    Parameters that the forward itself writes into (a teacher that follows, weights that are clamped) are here too.
    """
    aliases: dict[str, str]
    """Tied parameter name -> the name under which it is counted."""
    unused: tuple[str, ...]
    """Trainable parameters that the loss does not depend on."""
    conditional: frozenset[str] = frozenset()
    """Those whose gradient may be absent in a step, by the values in it (`ops/choice.py`)."""
    flags: tuple[str, ...] = ()
    """Of a way through a step that branches on values: nodes of what it depends on."""
    notices: tuple[str, ...]
    """What the user should know: how the loss was read, which ops draw random numbers, and so on."""
    precision: str
    """The job's precision, baked into the ops."""
    model: str = ""
    """The class of the model that was captured."""
    short: frozenset[str] = frozenset()
    """Ops that compute in float32 though all others are in float64 (`capture/widen.py`)."""
    known: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)
    """Fake values of ops on tensors like this graph's, by op and arguments, so that nobody asks torch twice; and how
    ops run where `data` cuts the samples, by the samples of each rank."""

    def nodes(self) -> dict[str, fx.Node]:
        """Every node by name."""
        return {node.name: node for node in self.graph.nodes}

    def ops(self) -> Iterator[fx.Node]:
        """The computing nodes, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    @property
    def held(self) -> tuple[Input, ...]:
        """What outlasts a step: parameters, then buffers."""
        return (*self.inputs_of("parameter"), *self.inputs_of("buffer"))

    @property
    def written(self) -> tuple[str, ...]:
        """Parameters that the forward itself writes into."""
        return tuple(entry.name for entry in self.inputs_of("parameter") if entry.name in self.new_buffers)

    def inputs_of(self, kind: InputKind) -> tuple[Input, ...]:
        """The inputs of one kind, in order."""
        return tuple(entry for entry in self.inputs if entry.kind == kind)


def without_gradients(graph: Graph, names: Collection[str]) -> Graph:
    """The same graph where nobody asks for the gradients of these parameters, nor computes what only they need."""
    kept = {name: node for name, node in graph.gradients.items() if name not in names}
    return replace(graph, gradients=kept, conditional=graph.conditional.difference(names))


def weighed_by_share(graph: Graph) -> Graph:
    """The same graph where other ranks or micro-batches may have other shapes: a weight that is a constant is not
    known to all any more."""
    if graph.static_weight is None:
        return graph
    return replace(graph, static_weight=None, weight_is_early=True, weight_is_shared=True)


def depends_on(node: fx.Node, names: Collection[str]) -> bool:
    """Whether a node is, or is computed from, one of those named."""
    return any(found.name in names for found in ancestors([node]))
