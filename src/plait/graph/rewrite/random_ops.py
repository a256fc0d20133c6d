"""Replace torch's random ops in a graph by plait's.

In: a functional aten graph whose nodes carry `meta["val"]`, and the node that holds the key (see `random_ops`).
Out: the same graph, changed in place, plus what was replaced and what could not be. It never changes an op that draws
no numbers (attention with dropout 0, dropout in evaluation), and never removes what only dead code reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.ops.draws import RULES, Draw, draws_nothing
from plait.torch_private.ops import OpOverload, arguments_of, schema_of


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
        rule = RULES.get(schema_of(node.target).name)
        with graph.inserting_before(node):
            draw = _GraphDraw(graph, key, num_rewritten, node, num_samples)
            made = rule(draw, arguments_of(node.target, node.args, node.kwargs)) if rule is not None else None
        if made is None:
            unsupported[str(node.target)] = None
            continue
        num_rewritten += 1
        if isinstance(made, tuple):
            for user in list(node.users):
                user.replace_all_uses_with(made[user.args[1]])
                graph.erase_node(user)
        else:
            node.replace_all_uses_with(made)
        graph.erase_node(node)
    return RewriteOutcome(num_rewritten=num_rewritten, unsupported=tuple(unsupported))


def _draws_numbers(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    # normal_functional and random are random without torch's tag.
    tagged = torch.Tag.nondeterministic_seeded in node.target.tags
    if not tagged and schema_of(node.target).name not in RULES:
        return False
    return not draws_nothing(arguments_of(node.target, node.args, node.kwargs))


class _GraphDraw(Draw):
    """Adds the nodes that stand for one random op."""

    def __init__(
        self, graph: fx.Graph, key: fx.Node, op: int, node: fx.Node, num_samples: int | None
    ) -> None:
        value = node.meta["val"]
        super().__init__(value[0] if isinstance(value, tuple | list) else value)
        self._graph, self._key, self._op, self._node, self._num_samples = graph, key, op, node, num_samples

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        created = self._graph.call_function(target, args, kwargs)
        created.meta = dict(self._node.meta)
        values = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        created.meta["val"] = target(*values[0], **values[1])
        return created

    def random(self, target: Any, like: Tensor, dtype: torch.dtype, *parameters: Any) -> fx.Node:
        shape, samples = list(like.shape), self._num_samples
        batch_dim, rows_per_sample = -1, 1
        if samples and shape and shape[0] >= samples and shape[0] % samples == 0:
            batch_dim, rows_per_sample = 0, shape[0] // samples
        placement = {"full": [], "start": [], "batch_dim": batch_dim, "rows_per_sample": rows_per_sample}
        return self.call(target, self._key, self._op, shape, dtype, *parameters, **placement)

    def tensor(self, value: Any) -> Tensor | None:
        return value.meta["val"] if isinstance(value, fx.Node) else None
