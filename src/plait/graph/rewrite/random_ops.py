"""Replace torch's random ops in a graph by plait's.

In: a functional aten graph whose nodes carry `meta["val"]`, and the node that holds the key (see `random_ops`).
Out: the same graph, changed in place, plus what was replaced and what could not be. It never changes an op that draws
no numbers (attention with dropout 0, dropout in evaluation), and never removes what only dead code reads.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from plait.graph.ops import random as random_ops
from plait.torch_private.ops import OpOverload, arguments_of, schema_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class RewriteOutcome:
    """What `rewrite_random` did."""

    num_rewritten: int
    """Random ops that were replaced; their op ids are 0 .. num_rewritten - 1, in the order of the graph."""
    unsupported: tuple[str, ...]
    """Random ops that were left alone as plait has no counterpart, each named once, in the order of the graph."""


def rewrite_random(graph: fx.Graph, key: fx.Node, num_samples: int | None = None) -> RewriteOutcome:
    """Replace every random op by its plait counterpart, which reads `key` (a node before all of them).

    `num_samples` is the number of samples in the micro-batch that was captured: a tensor whose first dim is a multiple
    of it is taken to hold samples there. None: no tensor is.
    """
    unsupported: dict[str, None] = {}
    num_rewritten = 0
    for node in list(graph.nodes):
        if not _draws_numbers(node):
            continue
        rewrite = _REWRITES.get(schema_of(node.target).name)
        with graph.inserting_before(node):
            emitter = _Emitter(graph=graph, key=key, op=num_rewritten, node=node, num_samples=num_samples)
            done = rewrite is not None and rewrite(emitter, _arguments(node))
        if done:
            num_rewritten += 1
        else:
            unsupported[str(node.target)] = None
    return RewriteOutcome(num_rewritten=num_rewritten, unsupported=tuple(unsupported))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The node's arguments by name, defaults filled in."""
    return arguments_of(node.target, node.args, node.kwargs)


def _draws_numbers(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    # normal_functional and random are random without torch's tag.
    if (
        torch.Tag.nondeterministic_seeded not in node.target.tags
        and schema_of(node.target).name not in _REWRITES
    ):
        return False
    arguments = _arguments(node)
    if any(arguments.get(name) is False for name in ("train", "training")):
        return False
    return not any(arguments.get(name, 1.0) == 0.0 for name in ("dropout_p", "dropout"))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Emitter:
    """Adds the nodes that stand for one random op."""

    graph: fx.Graph
    key: fx.Node
    op: int
    node: fx.Node
    num_samples: int | None
    result: Any = field(init=False)
    """The (first) tensor that the op returns, as captured."""

    def __post_init__(self) -> None:
        value = self.node.meta["val"]
        object.__setattr__(self, "result", value[0] if isinstance(value, tuple | list) else value)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        created = self.graph.call_function(target, args, kwargs)
        created.meta = dict(self.node.meta)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        created.meta["val"] = target(*values[0], **values[1])
        return created

    def random(self, target: Any, dtype: torch.dtype, *parameters: Any, like: Any = None) -> fx.Node:
        shape = list((self.result if like is None else like).shape)
        batch_dim, rows_per_sample = -1, 1
        if self.num_samples and shape and shape[0] >= self.num_samples and shape[0] % self.num_samples == 0:
            batch_dim, rows_per_sample = 0, shape[0] // self.num_samples
        placement = {"full": [], "start": [], "batch_dim": batch_dim, "rows_per_sample": rows_per_sample}
        return self.call(target, self.key, self.op, shape, dtype, *parameters, **placement)

    def exponential(self, like: Any) -> fx.Node:
        """Clocks that run at rate 1, one an element."""
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        draw = self.random(torch.ops.plait.uniform.default, wide, 0.0, 1.0, like=like)
        kept = self.call(aten.clamp_min.default, draw, random_ops.SMALLEST)
        return self.call(aten.neg.default, self.call(aten.log.default, kept))

    def finish(self, replacement: fx.Node) -> bool:
        self.node.replace_all_uses_with(replacement)
        self.graph.erase_node(self.node)
        return True


def _bernoulli(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    probability = arguments.get("p", arguments["self"])
    if not isinstance(probability, fx.Node):
        return emit.finish(
            emit.random(torch.ops.plait.bernoulli.default, emit.result.dtype, float(probability))
        )
    double = probability.meta["val"].dtype == torch.float64
    draw = emit.random(torch.ops.plait.uniform.default, torch.float64 if double else torch.float32, 0.0, 1.0)
    mask = emit.call(aten.lt.Tensor, draw, probability)
    return emit.finish(emit.call(aten._to_copy.default, mask, dtype=emit.result.dtype))


def _uniform(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    if not emit.result.is_floating_point():
        return False
    low, high = float(arguments.get("from", 0.0)), float(arguments.get("to", 1.0))
    return emit.finish(emit.random(torch.ops.plait.uniform.default, emit.result.dtype, low, high))


def _normal(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    if not emit.result.is_floating_point():
        return False
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    if not isinstance(mean, fx.Node) and not isinstance(std, fx.Node):
        return emit.finish(
            emit.random(torch.ops.plait.normal.default, emit.result.dtype, float(mean), float(std))
        )
    draw = emit.random(torch.ops.plait.normal.default, emit.result.dtype, 0.0, 1.0)
    return emit.finish(emit.call(aten.add.Tensor, emit.call(aten.mul.Tensor, draw, std), mean))


def _randint(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    low = arguments.get("low", arguments.get("from", 0))
    high = arguments.get("high", arguments.get("to"))
    if not (isinstance(low, int) and isinstance(high, int) and high - low <= random_ops.RANGE_LIMIT):
        return False
    return emit.finish(emit.random(torch.ops.plait.randint.default, emit.result.dtype, low, high))


def _native_dropout(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    """(input, p) -> (input * mask / (1 - p), mask)."""
    keep = 1.0 - float(arguments["p"])
    mask = emit.random(torch.ops.plait.bernoulli.default, torch.bool, keep)
    kept = emit.call(aten.mul.Tensor, arguments["input"], mask)
    scaled = emit.call(aten.mul.Tensor, kept, 1.0 / keep if keep > 0.0 else 0.0)
    for user in list(emit.node.users):
        user.replace_all_uses_with(scaled if user.args[1] == 0 else mask)
        emit.graph.erase_node(user)
    emit.graph.erase_node(emit.node)
    return True


def _exponential(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    if not emit.result.is_floating_point():
        return False
    clocks = emit.call(aten.div.Tensor, emit.exponential(emit.result), float(arguments.get("lambd", 1.0)))
    return emit.finish(emit.call(aten._to_copy.default, clocks, dtype=emit.result.dtype))


def _multinomial(emit: _Emitter, arguments: Mapping[str, Any]) -> bool:
    """Without replacement: the first of exponential clocks that run at these rates."""
    rates, count = arguments["self"], arguments["num_samples"]
    if arguments.get("replacement") and count > 1:
        return False
    order = emit.call(aten.div.Tensor, rates, emit.exponential(rates.meta["val"]))
    found = emit.call(aten.topk.default, order, count, -1)
    return emit.finish(emit.call(operator.getitem, found, 1))


_REWRITES: Mapping[str, Callable[[_Emitter, Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "aten::bernoulli": _bernoulli,
        "aten::rand": _uniform,
        "aten::rand_like": _uniform,
        "aten::uniform": _uniform,
        "aten::randn": _normal,
        "aten::randn_like": _normal,
        "aten::normal": _normal,
        "aten::normal_functional": _normal,
        "aten::randint": _randint,
        "aten::randint_like": _randint,
        "aten::random": _randint,
        "aten::native_dropout": _native_dropout,
        "aten::exponential": _exponential,
        "aten::multinomial": _multinomial,
    }
)
"""How each op is replaced, by the name in its schema; False: not this form of it, and the graph is unchanged."""
