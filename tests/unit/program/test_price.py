"""What collectives cost by every algorithm, and which is chosen: on links where the answer is known."""

from typing import Any

import pytest

from plait.cluster.cluster import Link
from plait.cluster.parse import parse_cluster
from plait.plan.named import resolve
from plait.program.hops.algorithms import rounds_of
from plait.program.hops.price import Network, algorithm_of, hop_travel, prices, round_times
from plait.program.instructions import Collective

SLOW = Link(latency_s=0.01, bandwidth=1e6, shared=True)
QUICK = Link(latency_s=0.0, bandwidth=1e12, shared=True)
FOUR = (0, 1, 2, 3)


def all_reduce(num_bytes: int, op: Any = "all_reduce") -> Collective:
    return Collective(name="sum", op=op, axis="data", num_bytes=num_bytes)


def test_rounds_last_as_long_as_their_busiest_wire() -> None:
    one_each = Network(hosts=FOUR, inner=QUICK, outer=SLOW)
    ring = round_times(rounds_of("all_reduce", "ring", 4), 4_000_000, FOUR, one_each)
    assert len(ring) == 6 and all(seconds == pytest.approx(1.01, abs=2e-3) for seconds in ring)
    paired = Network(hosts=(0, 0, 1, 1), inner=QUICK, outer=SLOW)
    levels = rounds_of("all_reduce", "hierarchical", 4, hosts=2)
    found = round_times(levels, 4_000_000, FOUR, paired)
    assert [round(seconds) for seconds in found] == [0, 2, 2, 0]  # two ranks of a host share its wire
    assert [paired.hosts_of(FOUR), paired.hosts_of((0, 2, 1, 3)), paired.hosts_of((0, 2))] == [2, 1, 2]


def test_the_cheapest_is_chosen_and_a_wish_is_followed() -> None:
    network = Network(hosts=(0, 0, 1, 1), inner=QUICK, outer=SLOW)
    costs = prices("all_reduce", 4_000_000, FOUR, network)
    assert list(costs.values()) == sorted(costs.values()) and costs["hierarchical"] < costs["ring"]
    assert algorithm_of("auto", all_reduce(4_000_000), FOUR, network) == next(iter(costs))
    assert algorithm_of("ring", all_reduce(4_000_000), FOUR, network) == "ring"
    assert algorithm_of("auto", all_reduce(8, "halo"), FOUR, network) == "backend"
    assert algorithm_of("ring", all_reduce(8), (0,), network) == "backend"


def test_a_tree_is_cheaper_where_latency_counts_and_a_ring_where_bandwidth_does() -> None:
    """Among eight hosts: 2 log n rounds of all, or 2 (n - 1) of an n-th."""
    network = Network(hosts=tuple(range(8)), inner=QUICK, outer=SLOW)
    small, large = (prices("all_reduce", size, tuple(range(8)), network) for size in (8, 80_000_000))
    assert small["tree"] < small["ring"] and large["ring"] < large["tree"]


def test_a_plan_prices_what_it_has_made_hop_by_hop() -> None:
    network = Network.of(parse_cluster("4x1xcpu"), 4)
    ring = resolve("ddp", 4, {"links": {"algorithm": "ring"}})
    found = hop_travel(ring, all_reduce(1000), FOUR, network)
    assert found is not None and found.latency_s > 0
    assert found.total_s == pytest.approx(prices("all_reduce", 1000, FOUR, network)["ring"])
    assert hop_travel(resolve("ddp", 4), all_reduce(1000), FOUR, network) is None
