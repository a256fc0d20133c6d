"""Where ops of a pipeline run: balance, cuts by name, tied parameters, the same cut for every size of a micro-batch."""

import pytest
import torch
from tests.unit.program.compiled import graph_of
from torch import fx

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.program.stage.cut_by_cost import Room
from plait.program.stage.cut_places import moved, same_places
from plait.program.stage.stages import assign_stages, forward_ops
from plait.program.stage.where import Stages

NAMES = ("mlp", "gpt", "gpt_tied", "unet", "resnet_bn", "moe_capacity", "hf_llama")


def finest(graph: Graph) -> float:
    """The cost of the costliest op: no cut is better balanced than that."""
    ops = len(forward_ops(graph))
    return max(assign_stages(graph, ops).costs)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_the_costliest_stage_is_about_as_cheap_as_it_can_be(name: str, num_stages: int) -> None:
    """A greedy cut is never off by more than one op; the search keeps within 2 % of the best one."""
    graph = graph_of(name, 4)
    stages = assign_stages(graph, num_stages)
    total = sum(stages.costs)
    assert max(stages.costs) <= 1.02 * (total / num_stages + finest(graph))
    assert len(stages.starts) == num_stages - 1
    assert sum(assign_stages(graph, 1).costs) == pytest.approx(total)


def test_the_best_balance_of_a_chain_of_equal_layers_is_found() -> None:
    """alexnet's layers differ by factors; every other cut of two stages has a costlier one, or is within 2 %."""
    graph = graph_of("alexnet", 4)
    best = min(
        max(assign_stages(graph, 2, starts=(start,)).costs) for start in range(1, len(forward_ops(graph)))
    )
    assert max(assign_stages(graph, 2).costs) <= 1.02 * best


def test_of_cuts_that_are_about_as_good_the_one_that_sends_least_is_taken() -> None:
    """A GPT is cut on its residual stream, not inside of attention or of the wide MLP."""
    graph = graph_of("gpt", 4)
    (start,) = assign_stages(graph, 2).starts
    (before,) = assign_stages(graph, 2, ("blocks.1",)).starts
    assert abs(start - before) <= 2, forward_ops(graph)[start]


def test_forward_runs_along_the_stages_and_backward_against_them() -> None:
    graph = graph_of("unet", 4)
    stages = assign_stages(graph, 4)
    for node in graph.ops():
        for source in node.all_input_nodes:
            if source.op != "call_function" or len(stages.of[node]) > 1 or len(stages.of[source]) > 1:
                continue
            ours, theirs = stages.of[node][0], stages.of[source][0]
            if node.meta["phase"] != "backward":
                assert theirs <= ours
            elif source.meta["phase"] == "backward":
                assert theirs >= ours


def test_every_op_has_a_stage() -> None:
    graph = graph_of("gpt_tied", 4)
    stages = assign_stages(graph, 4)
    needed: set[fx.Node] = set()
    stack = [graph.nodes()[name] for name in (graph.total, *graph.gradients.values())]
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    assert [node.name for node in needed if not stages.of[node]] == []


# --- cuts by name -------------------------------------------------------------------------------------------


def modules(graph: Graph, stages: Stages) -> list[set[str]]:
    found: list[set[str]] = [set() for _ in range(stages.num_stages)]
    for node in graph.ops():
        if node.meta["phase"] == "forward" and node.meta.get("module") and len(stages.of[node]) == 1:
            found[stages.of[node][0]].add(node.meta["module"].split(".")[0])
    return found


def test_stages_begin_with_the_named_modules() -> None:
    graph = graph_of("mlp", 4)
    stages = assign_stages(graph, 3, ("2", "4"))
    assert modules(graph, stages) == [{"0", "1"}, {"2", "3"}, {"4"}]
    assert stages.parameters == {
        "0.weight": (0,), "0.bias": (0,), "2.weight": (1,), "2.bias": (1,), "4.weight": (2,), "4.bias": (2,),
    }  # fmt: skip


def test_a_module_that_holds_others_can_be_named() -> None:
    graph = graph_of("gpt", 4)
    stages = assign_stages(graph, 2, ("blocks.1",))
    assert stages.parameters["blocks.0.mlp.2.weight"] == (0,)
    assert stages.parameters["blocks.1.norm1.weight"] == (1,)


@pytest.mark.parametrize(
    ("cut", "told"),
    [
        (("2",), "pipe.cut names 1 modules for 3 stages"),
        (("2", "nowhere"), "'nowhere' cannot begin a stage: no op belongs to it"),
        (("4", "2"), "'2' cannot begin a stage: it does not come after the one before"),
        (("0", "2"), "'0' cannot begin a stage: it does not come after the one before"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(cut: tuple[str, ...], told: str) -> None:
    with pytest.raises(PlanError, match=told) as caught:
        assign_stages(graph_of("mlp", 4), 3, cut)
    assert caught.value.fix
    assert "modules" in caught.value.fix


def test_more_stages_than_ops_are_refused() -> None:
    ops = len(forward_ops(graph_of("linear", 4)))
    with pytest.raises(PlanError, match=f"the model has {ops} ops for 64 stages") as caught:
        assign_stages(graph_of("linear", 4), 64)
    assert caught.value.fix == f"use at most {ops} stages."


# --- parameters ---------------------------------------------------------------------------------------------


def test_a_tied_parameter_is_on_both_of_its_stages_with_a_part_of_its_gradient_each() -> None:
    graph = graph_of("gpt_tied", 4)
    stages = assign_stages(graph, 4)
    assert stages.parameters["tokens.weight"] == (0, 3)
    parts = stages.gradients["tokens.weight"]
    assert sorted(parts) == [0, 3]
    assert [node.target for node in parts[0]] == [torch.ops.aten.embedding_dense_backward.default]
    others = {name: sorted(found) for name, found in stages.gradients.items() if name != "tokens.weight"}
    assert all(len(found) == 1 for found in others.values())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_a_gradient_is_kept_where_its_parameter_is_used(num_stages: int, size: int) -> None:
    """Of one sample, the gradient of the positions is that of the residual stream: a sum over stages behind the skips,
    none of which is a part of the parameter's gradient."""
    stages = assign_stages(graph_of("hf_vit", size), num_stages)
    for name, parts in stages.gradients.items():
        assert set(parts) == set(stages.parameters[name]), name
        assert len(parts) == 1, name


# --- the same cut for every size ----------------------------------------------------------------------------


def test_sizes_whose_ops_differ_are_cut_at_the_same_places() -> None:
    """The LSTM's output happens to be contiguous for one sample: the head is one op, else three."""
    one, two = forward_ops(graph_of("lstm", 1)), forward_ops(graph_of("lstm", 2))
    assert one != two
    places = same_places(two, one)
    assert 0 < len(places) < len(two) + 1
    for ours, theirs in places.items():
        if 0 < ours < len(two):
            assert two[ours - 1] == one[theirs - 1] or two[ours] == one[theirs]
    gone = next(place for place in range(len(two)) if place not in places)
    with pytest.raises(PlanError, match="which a micro-batch of another size does not have") as caught:
        moved((gone,), two, one)
    assert caught.value.fix is not None and "pipe.cut" in caught.value.fix


@pytest.mark.parametrize(
    ("ours", "theirs", "places"),
    [
        ("abc", "abc", {0: 0, 1: 1, 2: 2, 3: 3}),
        ("axyb", "azb", {0: 0, 1: 1, 3: 2, 4: 3}),
        ("axb", "ab", {0: 0, 1: 1, 3: 2}),
        ("ab", "axb", {0: 0, 1: 1, 2: 3}),
    ],
)
def test_places_that_two_chains_share(ours: str, theirs: str, places: dict[int, int]) -> None:
    assert same_places(list(ours), list(theirs)) == places


def test_only_allowed_places_are_taken() -> None:
    graph = graph_of("gpt", 4)
    (free,) = assign_stages(graph, 2).starts
    (start,) = assign_stages(graph, 2, places={free - 3, free + 5}).starts
    assert start in (free - 3, free + 5)


@pytest.mark.parametrize("name", ["small_batch_norm", "resnet_bn"])
def test_the_stage_that_reads_a_buffer_changes_it(name: str) -> None:
    """Wherever the cut falls, also between the two running statistics: a copy elsewhere would stay as it was."""
    graph = graph_of(name, 4)
    changed = {
        entry.node: entry.name for entry in graph.inputs_of("buffer") if entry.name in graph.new_buffers
    }
    for start in range(1, len(forward_ops(graph)), 3):
        stages = assign_stages(graph, 2, starts=(start,))
        for node in graph.ops():
            for source in node.all_input_nodes:
                if source.name in changed and stages.of[node]:
                    assert stages.of[node] == (stages.buffers[changed[source.name]],), (start, node)


def test_a_stage_that_keeps_many_micro_batches_gets_fewer_ops_where_memory_is_short() -> None:
    """The first stage of 1F1B keeps most: with little room it must end earlier than balance alone would have it."""
    graph = graph_of("gpt", 8)
    free = assign_stages(graph, 2)
    starts = [free.starts[0]]
    limit = 16 * 2**20
    while True:
        try:
            starts.append(
                assign_stages(graph, 2, room=Room(limit_bytes=limit, in_flight=(8, 1), held=4.0)).starts[0]
            )
        except PlanError:
            break
        limit = limit * 9 // 10
    assert starts[1] == starts[0], "16 MiB are enough for the best balance"
    assert starts == sorted(starts, reverse=True)
    assert starts[-1] < starts[0]


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    room = Room(limit_bytes=1000, in_flight=(2, 1), held=4.0)
    with pytest.raises(PlanError, match="no cut into 2 stages fits in 1000 B a rank") as raised:
        assign_stages(graph_of("gpt", 8), 2, room=room)
    assert "memory.limit" in str(raised.value.fix)
