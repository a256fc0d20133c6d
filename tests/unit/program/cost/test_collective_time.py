"""Times of communication: against published tables, and what the algorithms must do."""

from dataclasses import replace

import pytest

from plait.cluster.cluster import Cluster
from plait.cluster.emulated import emulated
from plait.cluster.parse import parse_cluster
from plait.options import Emulation
from plait.program.cost.collective_time import (
    PACKED_SHARE,
    PIECE_BYTES,
    Travel,
    bus_bandwidth,
    collective_seconds,
    collective_travel,
    is_two_level_cheaper,
)

MIB = 2**20
A100 = {2: (64, 404.7), 4: (64, 543.8), 8: (64, 684.6)}
"""Ranks -> (MiB, microseconds) of an all-reduce within a host: vTrain's tables for 2 and 4, nccl-tests for 8."""
LARGE = {2: (1024, 5442.8), 4: (1024, 7259.4), 8: (1024, 8203.9)}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("table", [A100, LARGE], ids=["64 MiB", "1 GiB"])
def test_all_reduces_of_one_host_are_as_published(ranks: int, table: dict[int, tuple[int, float]]) -> None:
    """Within 35 %: `link_share` is fitted on training runs, which reach more of the links than these tables."""
    cluster = parse_cluster("8xA100")
    mebibytes, measured = table[ranks]
    predicted = collective_seconds("all_reduce", mebibytes * MIB, cluster.link_of(1, ranks), cluster.device)
    assert predicted * 1e6 == pytest.approx(measured, rel=0.35)


def test_a_ring_moves_every_byte_once_and_a_sum_twice() -> None:
    cluster = parse_cluster("8xA100")
    reach, device = cluster.link_of(1, 8), cluster.device
    gather = collective_seconds("all_gather", 1e10, reach, device)
    assert gather == pytest.approx(7 / 8 * 1e10 / bus_bandwidth(reach, device), rel=0.01)
    assert collective_seconds("reduce_scatter", 1e10, reach, device) == gather
    assert collective_seconds("all_reduce", 1e10, reach, device) == pytest.approx(2 * gather, rel=0.01)
    assert collective_seconds("all_reduce", 1e10, cluster.link_of(1, 1), device) == 0.0


def test_a_tree_beats_a_ring_for_small_sums_on_many_hosts() -> None:
    cluster = parse_cluster("64x8xA100")
    reach = cluster.link_of(1, 512)
    small = collective_seconds("all_reduce", 1024, reach, cluster.device)
    ring = 2 * 511 * cluster.between.latency_s
    assert small < ring / 4


def test_a_switch_that_adds_up_is_quicker() -> None:
    cluster = parse_cluster("8xH100")
    reach = cluster.link_of(1, 8)
    plain = replace(reach, inner=replace(reach.inner, in_network=False))
    ratio = collective_seconds("all_reduce", 1e9, plain, cluster.device) / collective_seconds(
        "all_reduce", 1e9, reach, cluster.device
    )
    assert 1.2 < ratio < 1.7  # 482 against 367 GB/s of 16 GiB on eight H200


def test_members_of_one_host_share_its_adapters_only_where_the_wire_is_shared() -> None:
    cluster = parse_cluster("4x8xA100")
    whole, part = cluster.link_of(1, 32), cluster.link_of(8, 4)
    assert bus_bandwidth(whole, cluster.device) > 7 * bus_bandwidth(part, cluster.device)
    shared = replace(part, outer=replace(part.outer, shared=True))
    assert bus_bandwidth(shared, cluster.device) == pytest.approx(bus_bandwidth(part, cluster.device) / 8)


def test_processors_work_before_the_wire_and_after_it_and_with_other_pieces_meanwhile() -> None:
    """Two hosts of two ranks on as many processors, and on half as many, which share these; on both levels."""
    network = Emulation.parse("bandwidth=1Gbit,latency=1ms,hosts=2x2")
    many, few = (emulated(parse_cluster(f"{count}xcpu"), network) for count in (4, 2))

    def travel(cluster: Cluster, num_bytes: int) -> Travel:
        return collective_travel("all_reduce", num_bytes, cluster.link_among(range(4)), cluster.device)

    between = many.between
    one, shared, four = travel(many, PIECE_BYTES), travel(few, PIECE_BYTES), travel(many, 4 * PIECE_BYTES)
    assert one.work_s == pytest.approx(
        2 * between.work_s + 1.5 * PIECE_BYTES * between.work_s_per_byte
    )  # in memory all of it, by sockets a half
    assert shared.work_s == pytest.approx(2 * one.work_s) and shared.wire_s == one.wire_s
    assert (one.pieces, one.edge_s, one.between_s) == (1, one.work_s / 2, 0.0)
    assert one.total_s == pytest.approx(one.wire_s + one.latency_s + one.work_s)
    assert four.pieces == 4 and four.between_s == pytest.approx(0.75 * four.work_s)
    assert four.between_s < four.wire_s
    assert four.total_s == pytest.approx(four.wire_s + four.latency_s + four.work_s / 4)  # the rest is hidden
    slow = replace(many, between=replace(between, work_s_per_byte=1e-6))
    assert (
        travel(slow, 4 * PIECE_BYTES).total_s > travel(slow, 4 * PIECE_BYTES).work_s
    )  # here it is what counts
    assert travel(many, PIECE_BYTES + 2048).pieces == 1


def test_over_our_own_sockets_two_levels_send_less_between_hosts() -> None:
    """Two hosts of two ranks, which share a wire: each host sends the tensor once, not twice; small sums go at once."""
    network = Emulation.parse("bandwidth=1Gbit,latency=1ms,hosts=2x2")
    cluster = emulated(parse_cluster("4xcpu"), network)
    between = replace(cluster.between, work_s=0.0, work_s_per_byte=0.0)
    reach, device = replace(cluster.link_among(range(4)), outer=between), cluster.device
    latency_s, kernel_s = cluster.between.latency_s, device.calibration.kernel_s
    assert is_two_level_cheaper("all_reduce", 1e8, reach)
    within = replace(reach, size=2, hosts=1)
    piece_s = collective_seconds("all_gather", PIECE_BYTES, within, device)  # the others meanwhile, in memory
    expected = 1e8 / 125e6 + latency_s + kernel_s + 2 * piece_s  # between two hosts in one exchange
    assert collective_seconds("all_reduce", 1e8, reach, device) == pytest.approx(expected)
    assert not is_two_level_cheaper("all_reduce", 8, reach)
    assert collective_seconds("all_reduce", 8, reach, device) == pytest.approx(latency_s + kernel_s, rel=1e-3)
    alone = cluster.link_among((0, 2))
    assert alone.per_host == 1 and not is_two_level_cheaper("all_reduce", 1e8, alone)


def test_one_rank_sends_to_each_of_the_others_in_turn() -> None:
    cluster = parse_cluster("8xA100")
    device, begin_s = cluster.device, cluster.device.calibration.kernel_s
    taken = {
        n: collective_seconds("broadcast", 1e9, cluster.link_of(1, n), device) - begin_s for n in (2, 4, 8)
    }
    assert [taken[n] / taken[2] for n in (4, 8)] == pytest.approx([3, 7])


@pytest.mark.parametrize(
    ("bandwidth", "levels", "share"),
    [
        ("1Gbit", True, PACKED_SHARE),
        ("1Gbit", False, PACKED_SHARE),
        ("3Gbit", True, PACKED_SHARE),  # of which each of two ranks has a half
        ("10Gbit", True, 1.0),
    ],
)
def test_numbers_that_slow_sockets_pack_take_the_wire_for_less(
    bandwidth: str, levels: bool, share: float
) -> None:
    machine = parse_cluster("4xcpu")
    quick = replace(machine, between=replace(machine.between, bandwidth=1e12))
    cluster = emulated(quick, Emulation.parse(f"bandwidth={bandwidth},latency=1ms,hosts=2x2"))
    reach, device = cluster.link_among(range(4)), cluster.device
    plain, packed = (
        collective_travel("all_reduce", 1e8, reach, device, levels=levels, packs=packs)
        for packs in (False, True)
    )
    assert packed.wire_s == pytest.approx(share * plain.wire_s)
    assert packed._replace(wire_s=plain.wire_s) == plain
    if share < 1:  # links of other libraries pack nothing
        indirect = replace(reach, outer=replace(reach.outer, direct=False))
        assert collective_travel("all_reduce", 1e8, indirect, device, packs=True) == collective_travel(
            "all_reduce", 1e8, indirect, device
        )
