"""Where the local graph of a micro-batch is cut for the step that is being written.

In: a local graph, the buckets that its gradients go to, where parameters are held. Out: pieces, cut where a bucket is
full and where parameters must be fetched first; what computes the weight of the loss comes before the rest.
"""

from collections.abc import Mapping, Sequence

import torch

from plait.graph.graph import Graph
from plait.nodes import ancestors
from plait.program.layout import Layout
from plait.program.local.local_graph import LocalGraph
from plait.program.program import Bucket
from plait.program.segment.buckets import bucket_reads
from plait.program.segment.cut import Piece, cut
from plait.program.segment.gathers import groups_by_input
from plait.program.segment.split import StageGraph
from plait.program.write.push_pull import SERVERS, buckets_by_input


def ends_of_buckets(part: StageGraph, local: LocalGraph, buckets: Sequence[Bucket]) -> list[str]:
    """The last gradient of each bucket that a stage fills."""
    order = {node.name: index for index, node in enumerate(local.graph.nodes)}
    found = []
    for bucket in buckets:
        names = [part.gradients[name] for name in bucket.parameters if name in part.gradients]
        found += [max(names, key=order.__getitem__)] if names else []
    return found


def step_pieces(
    graph: Graph,
    local: LocalGraph,
    buckets: tuple[Bucket, ...],
    layout: Layout,
    prefix: str,
    device: torch.device,
    used: Mapping[str, int],
) -> tuple[list[Piece], list[Piece]]:
    """(pieces that compute the weight early, pieces of the rest); `used` are groups of parameters, by placeholder, at
    which the step is cut where they are not gathered."""
    nodes = list(local.graph.nodes)
    by_name = {node.name: node for node in nodes}
    order = {node.name: index for index, node in enumerate(nodes)}
    ends = []
    for index in range(len(buckets)):
        names = bucket_reads(graph, local, buckets, index)
        ends += [max(names, key=order.__getitem__)] if names else []
    served = any(bucket.axis == SERVERS for bucket in buckets)
    group_of = buckets_by_input(graph, buckets) if served else groups_by_input(graph, layout) or used
    early = early_pieces(graph, local, prefix, device, group_of)
    wanted = {local.total, *local.gradients.values(), *local.new_buffers.values()}
    if graph.static_weight is None and not graph.weight_is_early:
        wanted.add(local.weight)
    needed = ancestors([by_name[name] for name in wanted])
    rest = cut([n for n in nodes if n in needed], wanted, ends, prefix, device, group_of, groups_stay=served)
    return early, rest


def early_pieces(
    graph: Graph, local: LocalGraph, prefix: str, device: torch.device, group_of: Mapping[str, int]
) -> list[Piece]:
    """What computes the weight of a micro-batch from the batch alone."""
    if graph.static_weight is not None or not graph.weight_is_early:
        return []
    nodes = list(local.graph.nodes)
    needed = ancestors([node for node in nodes if node.name == local.weight])
    return cut([n for n in nodes if n in needed], {local.weight}, (), f"{prefix}weight_", device, group_of)
