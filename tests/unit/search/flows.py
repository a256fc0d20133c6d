"""Small graphs along an axis of their own, captured once for the tests of this folder."""

from functools import cache

import torch
from tests.unit.program.compiled import graph_of
from torch import nn

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.program.place.placement import AxisShares
from plait.search.place.flow import Flow
from plait.search.place.megatron import Pattern, megatron


def along(graph: Graph, ranks: int) -> Flow:
    """A graph's flow along `tensor`."""
    return Flow(graph, AxisShares(name="tensor", units=(1,) * ranks))


@cache
def flow_of(name: str, ranks: int) -> Flow:
    """A case of the zoo, four samples, in float64."""
    return along(graph_of(name, 4), ranks)


@cache
def pattern_of(name: str, ranks: int, *, sequence: bool = False) -> Pattern:
    """The pattern on a case of the zoo."""
    return megatron(flow_of(name, ranks), {}, {}, sequence=sequence)


def graph_of_layers(*layers: nn.Module, width: int, samples: int = 8) -> Graph:
    """Layers in a row on vectors, with the mean square of their output as the loss."""
    job = Job(
        model=lambda: nn.Sequential(*layers),
        data=[(torch.zeros(width), torch.zeros(width))] * samples,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=samples,
        steps=1,
    )
    return Captures(job).of_size(samples)
