"""Where everything of a model runs in a pipeline: the value, and how it follows from the stages of ops.

In: a graph, the stage of every op that has just one. Out: `Stages`: also of what is copied into every stage that reads
it, of parameters, and of the parts of a gradient that several stages compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.graph.storage import is_item, shows_input
from plait.program.stage.changing import check_homes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Where everything runs."""

    num_stages: int
    of: Mapping[fx.Node, tuple[int, ...]]
    """The stages that run a node, in order; several where it is copied."""
    parameters: Mapping[str, tuple[int, ...]]
    """The stages that read a parameter; several where it is tied."""
    buffers: Mapping[str, int]
    """The stage that makes the new value of a buffer."""
    gradients: Mapping[str, Mapping[int, tuple[fx.Node, ...]]]
    """Parameter -> stage -> the nodes whose sum is that stage's part of the gradient."""
    starts: tuple[int, ...]
    """Where the second and later stages begin, counted in forward ops."""
    ops: tuple[str, ...]
    """The forward ops that are counted."""
    of_parameters: frozenset[str]
    """Forward ops that read parameters alone, such as the transpose in front of a product."""
    costs: tuple[float, ...]
    """FLOPs of each stage, forward and backward, memory traffic counted in."""

    def home(self, parameter: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stages that read a parameter, and those with a part of its gradient: a bucket's parameters share both."""
        return self.parameters[parameter], tuple(sorted(self.gradients.get(parameter, ())))


def described(
    graph: Graph,
    free: set[fx.Node],
    stage_of: dict[fx.Node, int],
    num_stages: int,
    costs: Sequence[float],
    forward: Sequence[fx.Node],
    starts: Sequence[int],
    homes: Mapping[str, int],
) -> Stages:
    """`free` are ops that any stage can compute; `forward` those that are counted, with their `costs`.

    `homes`: the stages of changed buffers that are known already.
    """
    nodes = graph.nodes()
    runs: dict[fx.Node, set[int]] = {node: {stage} for node, stage in stage_of.items()}
    gradients: dict[str, dict[int, tuple[fx.Node, ...]]] = {}
    placeholders = {entry.name: nodes[entry.node] for entry in graph.inputs_of("parameter")}
    for name, made in graph.gradients.items():
        parts: dict[int, tuple[fx.Node, ...]] = {}
        readers = _forward_stages(placeholders[name], stage_of)
        for leaf in _summands(nodes[made], stage_of, readers):
            stage = _home(stage_of.get(leaf, num_stages - 1), readers)
            parts[stage] = (*parts.get(stage, ()), leaf)
        gradients[name] = parts
    for node in reversed(list(graph.ops())):  # copies, from their readers up
        wanted = runs.setdefault(node, set())
        if node in free or is_copied(node):
            for user in node.users:
                wanted |= runs.get(user, set())
    for leaving in (nodes[graph.total], nodes[graph.weight]):
        runs[leaving] = runs.get(leaving) or {num_stages - 1}
    new = {name: nodes[node] for name, node in graph.new_buffers.items()}
    homes = {name: homes.get(name, max(runs.get(node, ()), default=0)) for name, node in new.items()}
    for name, node in new.items():
        if node in free:
            runs[node].add(homes[name])
    _spread(graph, free, runs)
    check_homes(graph, homes, runs)
    per_stage = [0.0] * num_stages
    for node, cost in zip(forward, costs, strict=True):
        per_stage[stage_of[node]] += cost
    return Stages(
        num_stages=num_stages,
        of={node: tuple(sorted(found)) for node, found in runs.items()},
        parameters={
            entry.name: _reading(nodes[entry.node], runs, gradients.get(entry.name, {}))
            for entry in graph.inputs_of("parameter")
        },
        buffers=homes,
        gradients=gradients,
        starts=tuple(starts),
        ops=texts_of(forward),
        of_parameters=_of_parameters(graph),
        costs=tuple(per_stage),
    )


def _spread(graph: Graph, free: set[fx.Node], runs: dict[fx.Node, set[int]]) -> None:
    """What is read by a copy is copied too, where it is free."""
    for node in reversed(list(graph.ops())):
        if node in free:
            for user in node.users:
                runs[node] |= runs.get(user, set())


def is_copied(node: fx.Node) -> bool:
    """Views that are no smaller than what they show: cheaper to show again than to send."""
    if (
        not shows_input(node)
        or is_item(node)
        or len(node.all_input_nodes) != 1
        or not isinstance(node.meta["val"], torch.Tensor)
    ):
        return False
    source = node.all_input_nodes[0].meta["val"]
    return isinstance(source, torch.Tensor) and source.numel() <= node.meta["val"].numel()


def _reading(
    node: fx.Node, runs: Mapping[fx.Node, set[int]], parts: Mapping[int, tuple[fx.Node, ...]]
) -> tuple[int, ...]:
    found = set(parts)
    for user in node.users:
        found |= runs.get(user, set())
    return tuple(sorted(found)) or (0,)


def _of_parameters(graph: Graph) -> frozenset[str]:
    names = {entry.node for entry in graph.inputs_of("parameter")}
    found: set[str] = set()
    for node in graph.ops():
        sources = node.all_input_nodes
        if (
            node.meta["phase"] != "backward"
            and sources
            and all(source.name in names or source.name in found for source in sources)
        ):
            found.add(node.name)
    return frozenset(found)


def _home(stage: int, readers: set[int]) -> int:
    """The stage that keeps a part of a gradient: one that uses the parameter, to which it is sent if need be.

    A gradient that is also that of an activation (a bias added to one sample) is made by the stage of the next op.
    """
    if stage in readers or not readers:
        return stage
    return max((reader for reader in readers if reader < stage), default=min(readers))


def _forward_stages(parameter: fx.Node, stage_of: Mapping[fx.Node, int]) -> set[int]:
    """The stages whose forward reads a parameter; a view of it is read where its readers are."""
    found: set[int] = set()
    for user in parameter.users:
        if user.meta["phase"] != "backward":
            found |= _forward_stages(user, stage_of) if is_copied(user) else set()
            found |= {stage_of[user]} if user in stage_of else set()
    return found


def _summands(node: fx.Node, stage_of: Mapping[fx.Node, int], readers: set[int]) -> list[fx.Node]:
    """The parts of a gradient that different stages compute: a sum over stages is left to the end of the step.

    Only stages that use the parameter (`readers`) have a part of their own: other sums over stages, as behind a skip
    connection, belong to the gradient of an activation.
    """
    if node.target is torch.ops.aten.add.Tensor and not node.kwargs and len(node.args) == 2:
        left, right = node.args
        if (
            isinstance(left, fx.Node)
            and isinstance(right, fx.Node)
            and left in stage_of
            and right in stage_of
        ):
            parts = [*_summands(left, stage_of, readers), *_summands(right, stage_of, readers)]
            stages = {stage_of[part] for part in parts}
            if len(stages) > 1 and stages <= readers:
                return parts
    return [node]


def texts_of(forward: Sequence[fx.Node]) -> tuple[str, ...]:
    """Ops by target and module."""
    return tuple(f"{node.target} of {node.meta.get('module', '') or 'the model'}" for node in forward)
