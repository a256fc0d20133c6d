"""Local graphs: local shapes, communication once where placements change, errors where a rule lies."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import graph_of, placed_on_data
from tests.unit.program.one_op import one_op, run_on_ranks

from plait.errors import ProgramError
from plait.program.local.communicate import all_gather, all_reduce
from plait.program.local.ends import ends_of
from plait.program.local.functions import nothing, weighted_share
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.placement import AxisShares, P, R, Shard, Strategy

aten, ours = torch.ops.aten, torch.ops.plait


def local(name: str, units: tuple[int, ...], rank: int, size: int = 7) -> LocalGraph:
    graph = graph_of(name, size)
    return localize(graph, [placed_on_data(graph, units)], [rank], local_batch_norm=False)


def communication(graph: LocalGraph) -> Counter[str]:
    return Counter(
        node.target.__name__ for node in graph.graph.nodes if node.target in (all_gather, all_reduce)
    )


def test_inputs_have_the_shapes_of_the_share() -> None:
    graph = graph_of("gpt", 7)
    for rank, size in enumerate((3, 2, 2)):
        found = {
            node.name: node.meta["val"]
            for node in local("gpt", (3, 2, 2), rank).graph.nodes
            if node.op == "placeholder"
        }
        for entry in graph.inputs_of("batch"):
            assert found[entry.node].shape == (size, 8)
        for entry in graph.inputs_of("parameter"):
            assert found[entry.node].shape == graph.nodes()[entry.node].meta["val"].shape


def test_one_rank_runs_the_graph_as_it_is() -> None:
    graph = graph_of("mlp", 7)
    found = [node.target for node in local("mlp", (7,), 0).graph.nodes if node.op == "call_function"]
    assert found == [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_a_graph_whose_samples_do_not_meet_communicates_nothing() -> None:
    assert not communication(local("gpt", (4, 3), 1))


def test_all_ranks_communicate_alike_also_those_with_an_empty_share() -> None:
    for name in ("small_batch_norm", "contrastive"):
        found = [communication(local(name, (3, 0, 4), rank)) for rank in range(3)]
        assert found[0]
        assert found[0] == found[1] == found[2]


def test_an_empty_share_runs_no_kernel_on_its_pieces() -> None:
    """Many of torch's kernels refuse tensors without elements; some end the process."""
    nodes = [node for node in local("gpt", (7, 0), 1).graph.nodes if node.op == "call_function"]
    assert any(node.target is nothing for node in nodes)
    assert not any("attention" in str(node.target) or "layer_norm" in str(node.target) for node in nodes)


def test_a_conversion_is_written_once_and_shared() -> None:
    """The contrastive loss needs all right views in the forward and again in the backward."""
    found = [node for node in local("contrastive", (4, 3), 0).graph.nodes if node.target is all_gather]
    assert len({node.args[0] for node in found}) == len(found)


def test_what_leaves_is_whole_or_a_sum() -> None:
    found = local("mlp", (4, 3), 0)
    assert found.total_placement == (P,)
    assert set(found.gradient_placements.values()) == {(P,)}


def test_a_micro_batch_leaves_its_gradients_like_the_first_of_the_step() -> None:
    """One sample cannot be cut: its gradients are whole on every rank, and only the rank that has it may add them."""
    first, last = graph_of("mlp", 4), graph_of("mlp", 1)
    ends = [ends_of(first, placed_on_data(first, (2, 2)))]
    placed = placed_on_data(last, (1, 0))
    alone = localize(last, [placed], [0], local_batch_norm=False)
    whole = [name for name, placement in alone.gradient_placements.items() if placement == (R,)]
    assert whole
    for rank, fraction in enumerate((1.0, 0.0)):
        found = localize(last, [placed], [rank], local_batch_norm=False, ends=ends)
        assert set(found.gradient_placements.values()) == {(P,)}
        assert found.total_placement == (P,)
        shares = [node.args[1] for node in found.graph.nodes if node.target is weighted_share]
        assert shares == [fraction] * len(shares)
        assert len(shares) >= len(whole)


def test_a_rule_that_lies_about_a_shape_is_found() -> None:
    op = one_op(aten.sum.dim_IntList, (torch.ones(6, 6, dtype=torch.float64), [0]))
    axis = AxisShares(name="data", units=(2, 1, 3))
    with pytest.raises(ProgramError, match=r"gives \[6\] on this rank where its placement .* demands \[2\]"):
        run_on_ranks(op, Strategy((Shard(0),), (Shard(0),)), axis)


@pytest.mark.parametrize("lie", [0, 1])
@pytest.mark.parametrize(
    "op", [ours.attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default], ids=str
)
def test_no_output_of_attention_is_exempt(op: Any, lie: int) -> None:
    query = torch.ones(6, 2, 4, 8)
    call = one_op(op, (query, query, query, *((None, False, 0.5) if op is ours.attention.default else ())))
    axis, truth = AxisShares(name="data", units=(2, 1, 3)), Shard(0)
    outputs = [truth if index != lie else R for index in range(len(call.outputs))]
    with pytest.raises(ProgramError, match=r"gives \[2.* on this rank where its placement .* demands \[6"):
        run_on_ranks(call, Strategy((truth,) * 3, tuple(outputs)), axis)


@pytest.mark.parametrize("want", [R, Shard(0), Shard(1), Shard(0, 2)], ids=str)
@pytest.mark.parametrize("have", [R, P, Shard(0), Shard(1), Shard(0, 2)], ids=str)
def test_every_conversion_gives_the_same_tensor(have: Strategy, want: Strategy) -> None:
    """relu of a tensor that arrives in one placement and is wanted in another, put together again."""
    x = torch.randn(12, 6, dtype=torch.float64)
    op = one_op(aten.relu.default, (x,))
    axis = AxisShares(name="data", units=(2, 0, 1, 3))
    (parts,) = run_on_ranks(op, Strategy((want,), (want,)), axis, arrives=have)  # type: ignore[arg-type]
    for part in parts:
        torch.testing.assert_close(part, x.relu())


def test_what_is_whole_can_become_a_sum() -> None:
    x = torch.randn(12, 6, dtype=torch.float64)
    axis = AxisShares(name="data", units=(2, 0, 1, 3))
    (parts,) = run_on_ranks(one_op(aten.neg.default, (x,)), Strategy((P,), (P,)), axis, arrives=R)
    torch.testing.assert_close(parts[0], -x)


@pytest.mark.parametrize("output", [0, 1])
def test_the_shapes_of_attention_are_proven_like_all_others(output: int) -> None:
    """Its second output, of which the backward makes use, too."""
    graph = graph_of("gpt", 7)
    placed = placed_on_data(graph, (4, 3))
    node = next(n for n in graph.ops() if n.target is torch.ops.plait.attention.default)
    wrong = list(placed.outputs[node])
    assert wrong[output] == Shard(0)
    wrong[output] = R
    planted = replace(placed, outputs={**placed.outputs, node: tuple(wrong)})
    with pytest.raises(ProgramError, match=rf"{node.name} .* gives \[4, .* demands \[7, "):
        localize(graph, [planted], [0], local_batch_norm=False)
