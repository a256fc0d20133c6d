"""Views of parameters that come and go: each reader takes its own, of the parameter as it is at hand then.

In: a local graph. Out: the same graph, changed in place, in which no view of a parameter is handed from one segment to
another; to take a view costs nothing.
"""

from torch import fx

from plait.graph.graph import Graph
from plait.graph.storage import owner_of, shows_input
from plait.program.local.local_graph import LocalGraph
from plait.program.segment.recompute import frontier
from plait.program.stage.where import Stages


def with_own_views(source: Graph, local: LocalGraph, stages: Stages | None) -> LocalGraph:
    """Views that other stages read stay as they are."""
    graph = local.graph
    parameters = {entry.node for entry in source.inputs_of("parameter")}
    bound = frontier(source, local, stages)
    views = {
        node
        for node in graph.nodes
        if node.op == "call_function"
        and shows_input(node)
        and owner_of(node).name in parameters
        and node not in bound
    }
    for reader in list(graph.nodes):
        if reader.op != "call_function" or reader in views:
            continue
        for used in reader.all_input_nodes:
            if used in views:
                reader.replace_input_with(used, _taken_again(graph, used, reader, views))
    graph.eliminate_dead_code()
    return local


def _taken_again(graph: fx.Graph, view: fx.Node, reader: fx.Node, views: set[fx.Node]) -> fx.Node:
    """A copy of a view, and of those that it is a view of, in front of `reader`."""
    inputs = {
        used: _taken_again(graph, used, reader, views) if used in views else used
        for used in view.all_input_nodes
    }
    with graph.inserting_before(reader):
        made = graph.node_copy(view, lambda used: inputs[used])
    made.meta = {**view.meta, "phase": reader.meta["phase"]}
    return made
