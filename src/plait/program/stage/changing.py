"""Buffers that a step changes, in a pipeline: one stage reads such a buffer and makes its new value.

In: a graph. Out: for every changed buffer, what has to run together, as ops that nothing else waits for follow the
others; and between which ops no stage may begin. An earlier stage's forward of the next micro-batch cannot wait for
what a later stage makes of this one.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.graph.storage import users_through_views
from plait.nodes import ancestors


@dataclass(frozen=True, kw_only=True, slots=True)
class Changing:
    """Buffers whose new values hang on each other."""

    names: frozenset[str]
    chain: frozenset[fx.Node]
    """Ops that make nothing but new values."""
    sources: frozenset[fx.Node]
    """Ops of the model that the new values are made of."""
    readers: frozenset[fx.Node]
    """Ops of the model's forward that read the buffers."""


def changing(graph: Graph) -> list[Changing]:
    """All that a step changes."""
    nodes = graph.nodes()
    needed = ancestors(nodes[name] for name in (graph.total, graph.weight, *graph.gradients.values()))
    given = {entry.name: nodes[entry.node] for entry in graph.held if entry.name in graph.new_buffers}
    found: list[Changing] = []
    for name, made in graph.new_buffers.items():
        all_of_it = ancestors([nodes[made]], within=lambda node: node not in needed)
        chain = frozenset(node for node in all_of_it if node.op == "call_function")
        edge = {source for node in chain for source in node.all_input_nodes} | {nodes[made]}
        one = Changing(
            names=frozenset({name, *(other for other, node in given.items() if node in edge)}),
            chain=chain,
            sources=frozenset(_maker(node) for node in edge & needed if node.op == "call_function"),
            readers=frozenset(
                node
                for node in users_through_views(given[name])
                if node in needed and node.meta["phase"] != "backward"
            ),
        )
        for other in [other for other in found if other.names & one.names]:
            found.remove(other)
            one = Changing(
                names=one.names | other.names,
                chain=one.chain | other.chain,
                sources=one.sources | other.sources,
                readers=one.readers | other.readers,
            )
        found.append(one)
    return found


def _maker(node: fx.Node) -> fx.Node:
    return _maker(node.all_input_nodes[0]) if node.target is operator.getitem else node


def uncut(groups: Sequence[Changing], forward: Sequence[fx.Node], places: Collection[int] | None) -> set[int]:
    """The places, or all, where a stage may begin: not between two ops that have to be in one."""
    position = {node: index for index, node in enumerate(forward)}
    found = set(range(len(forward))) if places is None else set(places)
    for group in groups:
        reads = [position[node] for node in group.readers if node in position]
        if reads:
            last = max([*reads, *(position[node] for node in group.sources if node in position)])
            found -= set(range(min(reads) + 1, last + 1))
    return found


def settle(groups: Sequence[Changing], stage_of: dict[fx.Node, int]) -> dict[str, int]:
    """Move what only makes new values to where the buffers are read; returns the stages of buffers that follow."""
    homes: dict[str, int] = {}
    for group in groups:
        reads = {stage_of[node] for node in group.readers if node in stage_of}
        others = {stage_of[node] for node in group.sources if node in stage_of}
        own = {stage_of[node] for node in group.chain if node in stage_of}
        if reads or others or own:  # else they are made by the backward, or from the batch alone
            home = max(reads or others or own)
            if max(others, default=0) > home:
                raise _refused(min(group.names), {*reads, *others})
            stage_of |= {node: home for node in group.chain if node in stage_of}
            homes |= dict.fromkeys(group.names, home)
    return homes


def check_homes(graph: Graph, homes: Mapping[str, int], runs: Mapping[fx.Node, Collection[int]]) -> None:
    """Refuse stages that would read a buffer that another stage changes."""
    nodes = graph.nodes()
    for entry in graph.held:
        if entry.name not in homes:
            continue
        new = nodes[graph.new_buffers[entry.name]]
        if new.meta.get("phase") == "backward":
            raise PlanError(
                f"pipe: the backward changes {entry.name} (a hook on a gradient does), and pipelines run the next "
                "micro-batch's forward before it.",
                fix="use plan ddp or zero1-3, or change it in the forward.",
            )
        reading = {stage for user in nodes[entry.node].users for stage in runs.get(user, ())}
        if reading - {homes[entry.name]}:
            raise _refused(entry.name, {*reading, homes[entry.name]})


def _refused(name: str, stages: set[int]) -> PlanError:
    return PlanError(
        f"pipe: {name}, which the forward changes, would be used by stages "
        f"{', '.join(str(stage) for stage in sorted(stages))}: the first of them would begin the next micro-batch "
        "before the last has changed it.",
        fix="choose pipe.cut so that one stage has all ops that use it, use fewer stages, or plan ddp.",
    )
