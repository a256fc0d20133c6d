"""Plans with placements: by pattern, by search, by hand; and what `compile` will make of them."""

from dataclasses import replace

import pytest
from tests.unit.program.compiled import graph_of

from plait.errors import PlanError
from plait.job.order import shares
from plait.plan.named import resolve
from plait.plan.placements import AxisPlacements
from plait.plan.plan import Plan, parse_plan
from plait.program.place.place import place
from plait.program.place.propagate import Placements
from plait.search.place.cost import flow_cost
from plait.search.place.flow import Flow
from plait.search.place.resolve import resolve_again, resolve_placements


def placed(name: str, plan: Plan, axis: str) -> tuple[AxisPlacements, Placements, tuple[str, ...]]:
    """What a plan says after it was resolved, what `compile` makes of it, and what was told."""
    graph = graph_of(name, 4)
    plan, notices = resolve_placements(graph, plan)
    said = plan.placements_of(axis)
    assert said is not None
    found = place(graph, plan, shares(4, plan.data_ranks))
    return said, next(p for p in found if p.axis.name == axis), notices


def test_a_plan_without_such_axes_is_left_alone() -> None:
    plan = resolve("ddp", 2)
    assert resolve_placements(graph_of("mlp", 4), plan) == (plan, ())


@pytest.mark.parametrize("name", ["mlp", "gpt_tied", "hf_llama"])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_pattern_is_reached_from_its_entries(name: str, sequence: bool) -> None:
    """Four all-reduces a layer after `compile`'s own propagation, or as many reduce-scatters."""
    plan = resolve("megatron", 2, {"tensor": {"sequence": sequence}})
    said, reached, notices = placed(name, plan, "tensor")
    kinds = flow_cost(Flow(graph_of(name, 4), reached.axis), reached).collectives
    layers = {"mlp": 2, "gpt_tied": 10, "hf_llama": 10}[name]
    assert kinds["reduce_scatter" if sequence and name != "mlp" else "all_reduce"] == layers
    assert len(said.parameters) <= 10 and len(said.ops) <= 20
    assert notices[0].startswith("tensor=2: placements by pattern:")
    assert any("tensor.sequence changes nothing" in entry for entry in notices) == (
        sequence and name == "mlp"
    )


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2, "tensor": 2}])
def test_the_search_says_what_it_found(mesh: dict[str, int]) -> None:
    _, by_pattern, _ = placed("gpt", resolve("megatron", None, None, mesh), "tensor")
    _, by_search, notices = placed("gpt", resolve("tensor", None, None, mesh), "tensor")
    graph = graph_of("gpt", 4)
    pattern, found = (flow_cost(Flow(graph, p.axis), p) for p in (by_pattern, by_search))
    assert "placements by search (proven least" in notices[1]
    assert found.num_bytes < pattern.num_bytes and found.memory_bytes <= pattern.memory_bytes * (1 + 1e-6)


def test_what_a_person_wrote_comes_first_and_is_kept() -> None:
    plan = replace(
        resolve("megatron", 2),
        placements=(
            AxisPlacements(
                axis="tensor",
                parameters=(("blocks.0.mlp.*.weight", "R"), ("blocks.1.mlp.0.weight", "S(1)")),
            ),
        ),
    )
    said, reached, notices = placed("gpt", plan, "tensor")
    graph = graph_of("gpt", 4)
    nodes = graph.nodes()
    held = {e.name: str(reached.of(nodes[e.node])) for e in graph.inputs_of("parameter")}
    assert said.parameters[:2] == plan.placements[0].parameters
    assert (held["blocks.0.mlp.0.weight"], held["blocks.0.mlp.2.weight"]) == ("R", "R")
    assert held["blocks.1.mlp.0.weight"] == "S(1)"
    assert held["blocks.0.attention.qkv.weight"] == "S(0/3)"
    assert notices[-1] == "tensor=2: the placements that the plan names are kept."


def test_a_resolved_plan_is_a_file_that_says_the_same() -> None:
    plan, _ = resolve_placements(graph_of("gpt_tied", 4), resolve("megatron", 2))
    read = parse_plan(plan.to_yaml())
    assert read == plan
    assert resolve_placements(graph_of("gpt_tied", 4), read)[0].placements == plan.placements


def test_another_batch_keeps_the_parameters() -> None:
    """Six samples where the plan was resolved for four: ops whose shards count samples are chosen anew."""
    written = resolve("tensor", 2)
    first, _ = resolve_placements(graph_of("gpt", 4), written)
    again = resolve_again(graph_of("gpt", 6), written, first)
    held = []
    for plan, size in ((first, 4), (again, 6)):
        graph = graph_of("gpt", size)
        reached = place(graph, plan, shares(size, 1))[-1]
        held.append({e.name: reached.of(graph.nodes()[e.node]) for e in graph.inputs_of("parameter")})
    assert held[0] == held[1]


def test_memory_that_is_not_enough_is_refused() -> None:
    plan = resolve("tensor", 2, {"memory": {"limit": "1KiB"}})
    with pytest.raises(PlanError, match=r"need less than memory.limit=1KiB; the pattern needs \d+"):
        resolve_placements(graph_of("mlp", 4), plan)


def test_more_memory_than_megatron_needs_saves_bytes() -> None:
    graph = graph_of("gpt", 4)
    sent = []
    for limit in (None, "800KiB"):
        _, reached, _ = placed("gpt", resolve("tensor", 2, {"memory": {"limit": limit}}), "tensor")
        sent.append(flow_cost(Flow(graph, reached.axis), reached).num_bytes)
    assert sent[1] < sent[0]


def test_complaint_21_a_solver_that_finds_nothing_leaves_the_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        x, status, message = None, 1, "Time limit reached."

    monkeypatch.setattr("scipy.optimize.milp", lambda **_: Nothing)
    _, by_pattern, _ = placed("gpt", resolve("megatron", 2), "tensor")
    _, reached, notices = placed("gpt", resolve("tensor", 2), "tensor")
    assert reached.strategies == by_pattern.strategies
    assert notices[1].startswith("tensor=2: the pattern is used: the solver found nothing in")
    assert notices[1].endswith("(Time limit reached.).")


def test_layers_that_stay_whole_are_told_once_for_all_blocks() -> None:
    _, _, notices = placed("gpt", resolve("megatron", 8), "tensor")
    told = [entry for entry in notices if "stays whole" in entry]
    assert ["blocks.0.attention.qkv: aten.view" in told[0], "blocks.0.attention.out: " in told[1]] == [
        True
    ] * 2
    assert len(told) == 2


def test_an_axis_that_nothing_can_use_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(PlanError, match="axis tensor=3: nothing can use it"):
        resolve_placements(graph_of("gpt", 4), resolve("megatron", 3))


def test_domain_cuts_the_batch() -> None:
    said, reached, notices = placed("gpt", resolve("domain", 2), "domain")
    assert said.batch == (("batch.0", "S(1)"), ("batch.1", "S(1)"))
    assert notices == ("domain=2: the batch is cut by pattern: batch.0 S(1), batch.1 S(1).",)
    graph = graph_of("gpt", 4)
    held = {str(reached.of(graph.nodes()[entry.node])) for entry in graph.inputs_of("parameter")}
    assert held == {"R"}
