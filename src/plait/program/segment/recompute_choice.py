"""Choose which ops of the forward run again in the backward.

In: a graph, the local graph of one rank, the plan's `memory.recompute`. Out: `Again`, the nodes whose results are
dropped; everything else that the backward needs is kept. `full` and lists of modules drop all that is made and used
inside of one region alone (a block of the model, a module), so that a region's inputs are kept; `selective` finds the
fewest bytes from which the rest can be had without a product, a convolution, attention or a lookup, by a minimum cut.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import scipy  # its parts are imported when they are first used
import torch
from torch import fx

from plait.errors import PlanError
from plait.graph.cost import node_flops
from plait.graph.graph import Graph
from plait.graph.storage import is_item, shows_input, storage_bytes
from plait.program.local.local_graph import LocalGraph
from plait.program.place.op_keys import find_blocks
from plait.program.segment.recompute import Again, forward_nodes, frontier, is_backward, op_of
from plait.program.stage.stages import op_cost
from plait.program.stage.where import Stages
from plait.torch_private import pytree

_LARGEST_BLOCK = 0.75
"""A numbered module that holds more of the forward's cost than this is no repetition, but the model."""
_SHRINKS = 4
"""An op whose result is so many times smaller than its input is kept: that costs little, to run it again a lot."""


def choose(
    source: Graph, local: LocalGraph, setting: str | Sequence[str], stages: Stages | None = None
) -> Again:
    """What runs again under `memory.recompute=setting`; under `none`, what the user's own code wraps so."""
    bound = frontier(source, local, stages)
    if setting == "none":
        found = _inside(local, checkpointed(local), bound)
    elif setting == "selective":
        found = _by_cut(source, local, bound)
    elif setting == "full":
        found = _inside(local, _blocks(source, local), bound)
    else:
        found = _inside(local, _modules(local, setting), bound)
    ops: dict[tuple[str, int], bool] = {}
    for node in forward_nodes(local):
        ops[op_of(node)] = ops.get(op_of(node), False) or node in found
    return Again(
        nodes=frozenset(node.name for node in found),
        ops=ops,
        order=tuple(node.name for node in local.graph.nodes),
    )


def checkpointed(local: LocalGraph) -> dict[fx.Node, str]:
    """The call of torch.utils.checkpoint that each node was made in, where it was."""
    calls = {node: node.meta.get("again") for node in forward_nodes(local)}
    return {node: f"call {call}" for node, call in calls.items() if call}


def _inside(local: LocalGraph, region_of: dict[fx.Node, str], bound: set[fx.Node]) -> set[fx.Node]:
    """What is made in a region and used in the forward of that region alone."""
    found = set()
    for node in forward_nodes(local):
        readers = [user for user in node.users if user.op == "call_function" and not is_backward(user)]
        alone = node in region_of and all(region_of.get(user) == region_of[node] for user in readers)
        if node not in bound and (alone or not _tensors(node)):
            found.add(node)
    found -= {node for node in found if is_item(node) and node.args[0] not in found}
    for node in reversed(list(forward_nodes(local))):  # who keeps a view keeps the whole
        if node not in found and shows_input(node):
            found.discard(node.all_input_nodes[0])
    return found


def _blocks(source: Graph, local: LocalGraph) -> dict[fx.Node, str]:
    """The outermost repeated block of each node; where a model has none, stretches of equal cost."""
    costs = {node: op_cost(node) for node in forward_nodes(local)}
    inner = find_blocks(source)
    paths = {node: _numbered(node.meta.get("module", ""), inner) for node in costs}
    held: dict[str, float] = {}
    for node, cost in costs.items():
        for path in paths[node]:
            held[path] = held.get(path, 0.0) + cost
    total = sum(costs.values())
    repeated = {path for path, cost in held.items() if cost <= _LARGEST_BLOCK * total}
    found = {}
    for node in costs:
        block = next((path for path in paths[node] if path in repeated), None)
        if block is not None:
            found[node] = block
    return found or _stretches(costs)


def _numbered(module: str, inner: frozenset[str]) -> list[str]:
    """Numbered modules around and at `module` that have modules of their own, outermost first."""
    words = module.split(".")
    paths = [".".join(words[: end + 1]) for end, word in enumerate(words) if word.isdigit()]
    return [path for path in paths if path in inner]


def _stretches(costs: dict[fx.Node, float]) -> dict[fx.Node, str]:
    """About as many stretches as each has ops, so that what is kept and what runs again at once are alike.

    The last one is left out: the backward begins with it, so nothing is saved by making it anew.
    """
    count = max(2, round(math.sqrt(sum(cost > 0 for cost in costs.values()))))
    total, before = sum(costs.values()) or 1.0, 0.0
    found: dict[fx.Node, str] = {}
    for node, cost in costs.items():
        made = node.args[0] if is_item(node) else None
        stretch = int((before + cost / 2) / total * count)
        before += cost
        if made in found:
            found[node] = found[made]  # type: ignore[index]
        elif made is None and stretch < count - 1:
            found[node] = f"stretch {stretch}"
    return found


def _modules(local: LocalGraph, patterns: Sequence[str]) -> dict[fx.Node, str]:
    """The outermost module around each node that a pattern names."""
    found: dict[fx.Node, str] = {}
    unused = dict.fromkeys(patterns)
    for node in forward_nodes(local):
        words = node.meta.get("module", "").split(".")
        for path in (".".join(words[:end]) for end in range(1, len(words) + 1)):
            matching = [pattern for pattern in patterns if fnmatchcase(path, pattern)]
            if matching:
                found[node] = path
                for pattern in matching:
                    unused.pop(pattern, None)
                break
    if unused:
        known = dict.fromkeys(node.meta.get("module", "") for node in forward_nodes(local))
        raise PlanError(
            f"memory.recompute names {', '.join(unused)}, which is no module that runs"
            " (or lies in one that another pattern names).",
            fix=f"name modules such as {', '.join([name for name in known if name][:6])}.",
        )
    return found


def _by_cut(source: Graph, local: LocalGraph, bound: set[fx.Node]) -> set[fx.Node]:
    """The least bytes from which the backward's needs follow without an op that is bound or dear.

    Every node is an arc whose capacity is what keeping its result costs. Flow comes from nodes that must not run
    again and goes to the backward; of all minimum cuts the one nearest to the backward runs the least again.
    """
    nodes = list(forward_nodes(local))
    lookups = {node.name for node in source.ops() if node.target is torch.ops.aten.embedding.default}
    fixed = {node for node in nodes if node in bound or _is_dear(node, lookups)}
    keep = {node: _bytes_kept(node, node in bound) for node in nodes}
    finite = sum(size for size in keep.values() if size is not None)
    unit = max(1.0, finite / 2**29)  # capacities are 32 bits
    unlimited = 2**30
    index = {node: position for position, node in enumerate(nodes)}
    first, last = 2 * len(nodes), 2 * len(nodes) + 1
    arcs: dict[tuple[int, int], int] = {}
    for node, position in index.items():
        enter, leave = 2 * position, 2 * position + 1
        size = keep[node]
        arcs[enter, leave] = unlimited if size is None else math.ceil(size / unit)
        if node in fixed:
            arcs[first, enter] = unlimited
        for user in node.users:
            if user in index:
                arcs[leave, 2 * index[user]] = unlimited
            elif is_backward(user):
                arcs[leave, last] = unlimited
    needed = _leading_to(last, {arc: size for arc, size in arcs.items() if size > 0}, first)
    return {node for node, position in index.items() if 2 * position in needed and node not in bound}


def _leading_to(last: int, arcs: dict[tuple[int, int], int], first: int) -> set[int]:
    """After the greatest flow from `first` to `last`: from where more could still get to `last`."""
    shape = (last + 1, last + 1)
    rows, columns = ([arc[side] for arc in arcs] for side in (0, 1))
    capacity = scipy.sparse.csr_matrix((list(arcs.values()), (rows, columns)), shape=shape, dtype="int32")
    flow = scipy.sparse.csgraph.maximum_flow(capacity, first, last).flow
    left = scipy.sparse.csr_matrix(capacity.astype("int64") - flow.astype("int64"))
    left.eliminate_zeros()
    reached = scipy.sparse.csgraph.breadth_first_order(
        scipy.sparse.csr_matrix(left.T), last, return_predecessors=False
    )
    return {int(found) for found in reached}


def _is_dear(node: fx.Node, lookups: set[str]) -> bool:
    """Whether an op is too costly to run again beside what keeping its result takes."""
    if shows_input(node) or not _tensors(node) or is_item(node):
        return False
    if node_flops(node) > 0:
        return True
    made = sum(storage_bytes(tensor) for tensor in _tensors(node))
    read = sum(storage_bytes(tensor) for used in node.all_input_nodes for tensor in _tensors(used))
    if made * _SHRINKS < read and not isinstance(node.meta["val"], (tuple, list)):
        return True
    return node.meta["lowers"] in lookups and "change" not in node.meta


def _bytes_kept(node: fx.Node, is_bound: bool) -> int | None:
    """What it takes to keep a node's result; None: it is always had again, from what it shows or belongs to."""
    if not is_bound and (not _tensors(node) or shows_input(node)):
        return None
    if isinstance(node.meta["val"], (tuple, list)) and all(is_item(user) for user in node.users):
        return None
    return sum(storage_bytes(tensor) for tensor in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
