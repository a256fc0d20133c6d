"""Keys and values that several heads of queries share are not kept once for each of these.

In: the graph of one rank, in which attention reads keys that were repeated (`repeat_interleave`, or expanded and
copied, as models with grouped queries do it). Out: the same graph, where attention reads them as they were before; it
repeats them for as long as it runs. So what is kept for the backward is as small as the keys are. The numbers are the
same.
"""

from typing import Any

import torch
from torch import fx

from plait.nodes import drop_unread

aten, ours = torch.ops.aten, torch.ops.plait
_SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)


def with_grouped_heads(graph: fx.Graph) -> None:
    """Rewrite in place what is found."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (
            ours.attention.default,
            ours.attention_backward.default,
        ):
            continue
        at = 0 if node.target is ours.attention.default else 1
        key, value = node.args[at + 1 : at + 3]
        before = _before(key), _before(value)
        if None in before or before[0].meta["val"].shape[1] != before[1].meta["val"].shape[1]:
            continue
        node.args = (*node.args[: at + 1], *before, *node.args[at + 3 :])
        for given in (key, value):
            drop_unread(given)


def _before(repeated: Any) -> Any:
    """What [B, heads, S, D] was repeated from, head by head: [B, groups, S, D]; None: it was not."""
    batch, heads, length, width = repeated.meta["val"].shape
    node = repeated
    while node.target in _SAME and node.meta["val"].ndim in (4, 5):
        node = node.args[0]
    if node.target is not aten.expand.default or node.meta["val"].ndim != 5:
        return None
    shape, source = node.meta["val"].shape, node.args[0]
    groups = shape[1]
    if tuple(shape) != (batch, groups, heads // groups, length, width) or groups * shape[2] != heads:
        return None
    if source.target is not aten.unsqueeze.default or source.args[1] not in (2, -3):
        return None
    found = source.args[0]
    return found if tuple(found.meta["val"].shape) == (batch, groups, length, width) else None
