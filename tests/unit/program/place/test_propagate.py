"""Placements through whole graphs: the batch stays cut, gradients are partial sums, the choice ignores the ranks."""

from math import inf

import pytest
import torch
from tests.unit.program.compiled import graph_of, placed_on_data
from tests.unit.program.one_op import one_op
from tests.unit.run.training import CASES

from plait.plan.named import resolve
from plait.program.place import propagate as propagation
from plait.program.place.conversion_cost import conversion_cost
from plait.program.place.place import place
from plait.program.place.placement import AxisShares, P, Partial, Placement, R, Shard, overlaps
from plait.program.place.propagate import Listed, candidates, propagate
from plait.program.place.rules import Op, dtensor_fallback

aten = torch.ops.aten


SAMPLES_MEET = ("contrastive", "resnet_bn", "lstm", "hf_t5", "hf_llama", "moe_capacity")
"""Tokens of all samples compete for the capacity of an expert, as views compete in a contrastive loss."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in SAMPLES_MEET])
def test_no_tensor_is_gathered_where_samples_do_not_meet(name: str) -> None:
    """All but the padding mask of BERT, 8 bytes a sample, which transformers indexes with the samples' numbers."""
    placed = placed_on_data(graph_of(name, 7), (3, 2, 2))
    assert sum(entry.num_bytes for entry in placed.gathered) <= (56 if name == "hf_bert" else 0)


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "small_batch_norm", "other_norms", "masked_gpt"])
def test_every_gradient_is_a_partial_sum(name: str) -> None:
    graph = graph_of(name, 7)
    placed, nodes = placed_on_data(graph, (4, 3)), graph.nodes()
    assert {parameter for parameter, node in graph.gradients.items() if placed.of(nodes[node]) != P} == set()
    assert placed.of(nodes[graph.total]) == P


@pytest.mark.parametrize("name", ["gpt_dropout", "small_batch_norm", "contrastive"])
def test_the_choice_does_not_depend_on_the_number_of_ranks(name: str) -> None:
    """Else one rank and many would draw other random numbers."""
    graph = graph_of(name, 7)
    reference = placed_on_data(graph, (7,))
    for units in ((4, 3), (3, 2, 2), (2, 2, 2, 1), (1,) * 7 + (0,)):
        assert placed_on_data(graph, units).strategies == reference.strategies


def test_what_data_cuts_is_chosen_once_for_all_plans_of_a_graph() -> None:
    graph = graph_of("mlp", 7)
    placed = placed_on_data(graph, (4, 3))
    assert place(graph, resolve("zero3", 2), (4, 3)) == (placed,)
    (of_pipeline,) = place(graph, resolve("1f1b", None, {}, {"data": 2, "pipe": 2}), (4, 3))
    assert of_pipeline is placed
    assert placed_on_data(graph, (5, 2)) is not placed


def test_ways_that_were_listed_are_not_listed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, axis, listed = graph_of("gpt", 7), AxisShares(name="tensor", units=(1, 1)), Listed()
    inputs: dict[str, Placement] = {entry.node: Shard(0) for entry in graph.inputs_of("parameter")}
    first = propagate(graph, axis, inputs, listed=listed)
    assert listed
    monkeypatch.setattr(propagation, "candidates", None)
    assert propagate(graph, axis, inputs, listed=listed) == first


def test_an_op_without_a_rule_is_told() -> None:
    op = one_op(aten.linalg_qr.default, (torch.ones(6, 4, 4, dtype=torch.float64),))
    placed = propagate(op.graph, AxisShares(name="data", units=(2, 1, 3)), {"input0": Shard(0)})
    (entry,) = placed.gathered
    assert (entry.op, entry.num_bytes) == ("aten.linalg_qr.default", 6 * 4 * 4 * 8)
    assert placed.outputs[op.node][0] == R


@pytest.mark.skipif(
    dtensor_fallback._single_dim_rule(aten.linalg_inv_ex.default) is None,
    reason="this torch has no such rule",
)
def test_an_op_that_torch_has_a_rule_for_runs_by_it_and_is_told() -> None:
    op = one_op(aten.linalg_inv_ex.default, (torch.ones(6, 4, 4, dtype=torch.float64),))
    placed = propagate(op.graph, AxisShares(name="data", units=(2, 1, 3)), {"input0": Shard(0)})
    (entry,) = placed.gathered
    assert (entry.op, entry.num_bytes, entry.by_torch) == ("aten.linalg_inv_ex.default", 0, True)
    assert placed.outputs[op.node][0] == Shard(0)


def test_parameters_and_what_is_made_of_them_alone_stay_whole() -> None:
    graph = graph_of("gpt", 7)
    placed, nodes = placed_on_data(graph, (4, 3)), graph.nodes()
    assert {placed.of(nodes[entry.node]) for entry in graph.inputs_of("parameter")} == {R}
    assert {placed.of(nodes[entry.node]) for entry in graph.inputs_of("batch")} == {Shard(0)}


@pytest.mark.parametrize(
    ("have", "want", "cost"),
    [
        (R, R, 0.0),
        (Shard(0), Shard(0), 0.0),
        (P, P, 0.0),
        (Shard(0), P, inf),
        (P, R, 2.0),
        (Shard(0), R, 1.0),
    ],
)
def test_what_a_conversion_costs(have: Placement, want: Placement, cost: float) -> None:
    assert conversion_cost(have, want) == cost


def test_a_piece_costs_less_than_communication_and_more_than_nothing() -> None:
    assert (
        0 < conversion_cost(R, Shard(0)) < conversion_cost(Shard(0), R) < conversion_cost(Shard(0), Shard(1))
    )
    assert conversion_cost(P, Shard(0)) < conversion_cost(P, R)
    assert conversion_cost(R, P) == conversion_cost(R, Shard(0)), "a part of the sum is made locally too"


def test_an_axis_knows_its_pieces() -> None:
    axis = AxisShares(name="data", units=(2, 0, 1, 3))
    assert (axis.size, axis.total) == (4, 6)
    assert [axis.local(12, rank) for rank in range(4)] == [4, 0, 2, 6]
    assert [axis.offset(rank) for rank in range(4)] == [0, 2, 2, 3]
    assert axis.divides(18)
    assert not axis.divides(9)


def test_shards_print_as_people_write_them() -> None:
    assert [str(placement) for placement in (R, P, Shard(1), Shard(0, 8))] == ["R", "P", "S(1)", "S(0/8)"]
    assert isinstance(P, Partial)


def test_a_view_keeps_count_of_the_parts_before_a_cut() -> None:
    """[2, 12] with each row cut in two parts is [24] in four parts, never in two."""
    op = one_op(aten.view.default, (torch.ones(2, 12), [24]))
    axis = AxisShares(name="data", units=(2, 0, 1, 3))
    listed = {(s.inputs[0], s.outputs[0]) for s in candidates(Op(op.node, axis, frozenset({2})))}
    assert (Shard(1), Shard(0, 2)) in listed
    assert (Shard(1, 2), Shard(0, 4)) in listed
    assert (Shard(1, 2), Shard(0, 2)) not in listed


def test_two_axes_do_not_cut_the_same_digit_of_a_dim() -> None:
    """6 = 2 x 3: what one axis cuts in 2 the other may cut in 3 inside of each half, and not across them."""
    two, three = AxisShares(name="data", units=(1, 1)), AxisShares(name="tensor", units=(1, 1, 1))
    assert overlaps(Shard(0), two, Shard(0), three)
    assert overlaps(Shard(0), two, Shard(0), two)
    assert not overlaps(Shard(0), two, Shard(1), three)
    assert not overlaps(Shard(0), two, Shard(0, 2), three)
    assert not overlaps(Shard(0, 2), three, Shard(0), two)
    assert overlaps(Shard(0), three, Shard(0, 2), two), "halves do not begin where thirds do"
    assert not overlaps(R, two, Shard(0), three)
