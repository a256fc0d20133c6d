"""What a rank of a pipeline does with one micro-batch, cut into pieces.

In: the nodes of a stage, as `split` took them apart. Out: pieces of its forward and of its backward, cut where there is
communication and where a bucket is full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plait.graph.graph import Graph
from plait.program.local.local_graph import LocalGraph
from plait.program.segment.cut import Piece, cut
from plait.program.segment.split import StageGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePieces:
    """One stage's part of a micro-batch, cut into pieces."""

    graph: StageGraph
    forward: list[Piece]
    backward: list[Piece]
    """Where the schedule keeps the two apart: of `inputs` alone."""
    weights: list[Piece]
    """Of `weights` alone; empty where they are part of `backward`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What a rank of a pipeline does with one micro-batch."""

    graph: Graph
    local: LocalGraph
    early: list[Piece]
    stages: Mapping[int, StagePieces]
    number: int


def stage_pieces(
    stage: StageGraph,
    local: LocalGraph,
    ends: Sequence[str],
    prefix: str,
    device: torch.device,
    *,
    apart: bool,
    used: Mapping[str, int],
) -> StagePieces:
    """Cut a stage's nodes; `ends` are the last gradients of buckets, `apart`: weights have actions of their own.

    `used` are groups of parameters, by placeholder, at which it is cut as well.
    """
    sent = {
        direction: {name for (d, _), names in stage.sends.items() if d == direction for name in names}
        for direction in ("forward", "backward")
    }
    gradients = set(stage.gradients.values())
    read_later = {used.name for node in stage.backward for used in node.all_input_nodes}
    kept = {*read_later, *sent["forward"], *sent["backward"], *stage.new_buffers.values()}
    kept |= {local.total, local.weight} if stage.has_total else set()
    forward = cut(stage.forward, kept & _names(stage.forward), (), f"{prefix}s{stage.stage}.", device, used)
    if not apart:
        wanted = (gradients | sent["backward"]) & _names(stage.backward)
        backward = cut(stage.backward, wanted, ends, f"{prefix}s{stage.stage}.b.", device, used)
        return StagePieces(graph=stage, forward=forward, backward=backward, weights=[])
    read_by_weights = {used.name for node in stage.weights for used in node.all_input_nodes}
    wanted = (read_by_weights | gradients | sent["backward"]) & _names(stage.inputs)
    inputs = cut(stage.inputs, wanted, (), f"{prefix}s{stage.stage}.i.", device, used)
    weights = cut(
        stage.weights, gradients & _names(stage.weights), ends, f"{prefix}s{stage.stage}.w.", device
    )
    return StagePieces(graph=stage, forward=forward, backward=inputs, weights=weights)


def _names(nodes: Sequence[torch.fx.Node]) -> set[str]:
    return {node.name for node in nodes}
