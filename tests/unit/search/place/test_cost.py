"""Bytes, work and memory of placements, beside numbers worked out by hand."""

from math import inf

import pytest
from tests.unit.search.flows import along, flow_of, graph_of_layers, pattern_of
from torch import nn

from plait.program.place.conversion_cost import conversion_bytes
from plait.program.place.placement import P, Placement, R, Shard
from plait.search.place.complete import complete
from plait.search.place.cost import flow_cost


@pytest.mark.parametrize(
    ("have", "want", "part"),
    [
        (P, R, 2 * 3 / 4), (P, Shard(0), 3 / 4), (Shard(0), R, 3 / 4), (Shard(0), Shard(1), 3 / 4),
        (Shard(0), Shard(0, 2), 3 / 4), (R, Shard(0), 0), (R, P, 0), (P, P, 0), (Shard(0), P, inf),
    ],
)  # fmt: skip
def test_bytes_of_a_ring_of_four(have: Placement, want: Placement, part: float) -> None:
    assert conversion_bytes(have, want, 4) == part


def test_two_layers_cost_one_all_reduce() -> None:
    """Column, then row: the forward sums [8, 16] floats, the backward nothing, because the batch needs no gradient."""
    graph = graph_of_layers(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), width=16)
    flow = along(graph, 4)
    names = {name: node for node, name in flow.parameters.items()}
    cut = {names["0.weight"]: Shard(0), names["0.bias"]: Shard(0), names["2.weight"]: Shard(1)}
    cost = flow_cost(flow, complete(flow, cut, {}))
    assert cost.collectives == {"all_reduce": 1}
    assert cost.num_bytes == 2 * 3 / 4 * 8 * 16 * 4
    assert cost.flops == (2 * 2 * 8 * 16 * 32 + 3 * 2 * 8 * 16 * 32) / 4
    parameters = 2 * 4 * ((16 * 32 + 32 + 32 * 16) / 4 + 16)
    kept = 4 * (8 * 32 / 4 + 8 * 16)  # the hidden layer after its ReLU, and the output for the loss
    assert cost.memory_bytes == parameters + kept


def test_what_is_replicated_sends_nothing_and_computes_everything() -> None:
    flow = flow_of("gpt", 4)
    cost = flow_cost(flow, complete(flow, {}, {}))
    cut = flow_cost(flow, pattern_of("gpt", 4).placements)
    assert (cost.num_bytes, cost.collectives) == (0, {})
    assert cost.flops == 4 * cut.flops
    assert 2 * cut.memory_bytes < cost.memory_bytes


def test_a_conversion_is_paid_once_however_many_read_it() -> None:
    """The weight of the first layer, cut and gathered: once in the forward; the backward needs no input gradient."""
    graph = graph_of_layers(nn.Linear(16, 16), width=16)
    flow = along(graph, 2)
    weight = next(node for node, name in flow.parameters.items() if name == "0.weight")
    whole = complete(flow, {}, {})
    placements = complete(flow, {weight: Shard(0)}, whole.strategies)
    cost = flow_cost(flow, placements)
    assert cost.collectives == {"all_gather": 1}
    assert cost.num_bytes == 16 * 16 * 4 / 2
