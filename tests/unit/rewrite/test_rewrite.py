"""Rewritten graphs: what is merged and reordered, and that every plan computes what it did."""

import time
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import count as count_up
from typing import Any

import pytest
import torch
from tests.unit.rewrite.models import (
    Branches,
    Convolutions,
    Joined,
    Kernels,
    Language,
    Masked,
    Orders,
    Scores,
    Towers,
    Wide,
    job_of,
    language_job,
)
from torch import fx

from plait.cluster.devices import DEVICES
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.ops.beside import parameters_beside, run_beside
from plait.plan.named import resolve
from plait.plan.plan import with_settings
from plait.program.cost.op_time import op_name
from plait.rewrite import extract
from plait.rewrite.choose import settled_for
from plait.rewrite.constants import CONSTANT
from plait.rewrite.rewrite import Rewritten, rewrite
from plait.run.proof.compare import compare
from plait.run.proof.serial_run import Record, run_serially
from plait.search.place.orders import better_as_written

CPU = DEVICES["cpu"].device
"""What ways are priced on."""


def count(graph: Graph) -> Counter[str]:
    return Counter(str(node.target).removeprefix("aten.").split(".")[0] for node in graph.ops())


def written(graph: Graph) -> list[str | None]:
    return [node.format_node() for node in graph.graph.nodes]


@cache
def language() -> Rewritten:
    return rewrite(Captures(language_job()).of_size(8), CPU)


def test_products_of_one_input_are_merged_forward_and_backward() -> None:
    made = language()
    assert parameters_beside(made.graph) == tuple(
        names
        for i in range(2)
        for names in (
            tuple(f"blocks.{i}.{name}.weight" for name in "qkv"),
            tuple(f"blocks.{i}.{name}.bias" for name in "qkv"),
            tuple(f"blocks.{i}.{name}.weight" for name in ("gate", "up")),
        )
    )
    assert count(made.graph)["addmm"] == 2 * 2 + 1  # q, k, v as one, the output; the head
    assert count(made.graph)["mm"] == 2 * (2 + 8) + 2
    assert made.after_s < made.before_s and made.after < made.before


def test_what_is_chosen_does_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and tasks compile on their own, some of them slowly: they must get one program."""
    ticks = count_up(step=1e4)
    monkeypatch.setattr(time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    slow = rewrite(Captures(language_job()).of_size(8), CPU)
    assert slow.changed and written(slow.graph) == written(language().graph)


def test_problems_beyond_the_limit_stay_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Captures(job_of(Wide, 8, out=(8,))).of_size(32)
    free = rewrite(graph, CPU)
    monkeypatch.setattr(extract, "_MOST_COLUMNS", 0)
    bound = rewrite(graph, CPU)
    assert free.after_s < bound.after_s <= bound.before_s


def test_tasks_that_compile_on_their_own_rewrite_only_where_they_are_asked() -> None:
    plan = resolve("ddp", 2)
    assert plan.rewrite == "auto"
    assert settled_for(1, plan).rewrite == "auto"
    assert settled_for(2, plan).rewrite == "off"
    assert settled_for(2, with_settings(plan, {"rewrite": "on"})).rewrite == "on"


def test_names_of_what_enters_and_leaves_stay() -> None:
    made = language()
    given = Captures(language_job()).of_size(8)
    assert made.graph.inputs == given.inputs
    assert list(made.graph.gradients) == list(given.gradients)
    nodes = made.graph.nodes()
    for name, node in made.graph.gradients.items():
        entry = next(e for e in made.graph.inputs if e.name == name)
        assert nodes[node].meta["val"].shape == nodes[entry.node].meta["val"].shape


def test_every_node_keeps_the_marks_that_plans_need() -> None:
    graph = language().graph
    nodes = graph.nodes()
    order = {node: number for number, node in enumerate(graph.graph.nodes)}
    for node in graph.ops():
        if node.meta["phase"] == "forward":
            assert all(source.meta["phase"] == "forward" for source in node.all_input_nodes)
        else:
            assert nodes[node.meta["origin"]].meta["phase"] == "forward"
        assert all(order[source] < order[node] for source in node.all_input_nodes)


def test_a_wide_middle_is_multiplied_first() -> None:
    """The lecture's first example."""
    graph = Captures(job_of(Wide, 8, out=(8,))).of_size(32)
    made = rewrite(graph, CPU)
    products = [node for node in made.graph.ops() if node.target is torch.ops.aten.mm.default]
    weights = {entry.node for entry in made.graph.inputs_of("parameter")}

    def of_weights(node: fx.Node) -> bool:
        return all(source.name in weights for source in node.all_input_nodes)

    assert any(of_weights(node) for node in products)
    assert not any(256 in node.meta["val"].shape and 32 in node.meta["val"].shape for node in products)


def test_what_divides_scores_divides_what_they_are_made_of() -> None:
    graph = Captures(job_of(Scores, 64, 8, out=(64, 8))).of_size(32)
    made = rewrite(graph, CPU)

    def scaled(graph: Graph) -> list[int]:
        nodes = [
            n for n in graph.ops() if op_name(n.target) in ("mul", "div") and len(n.all_input_nodes) == 1
        ]
        return [n.meta["val"].numel() for n in nodes]

    scores = 32 * 2 * 64 * 64
    assert scaled(graph).count(scores) == 2  # forward and backward
    assert scores not in scaled(made.graph) and any("a batch of products" in name for name in made.rules)


def test_what_depends_on_nothing_is_computed_once() -> None:
    graph = Captures(job_of(Masked, 8, out=(8,))).of_size(32)
    made = rewrite(graph, CPU)
    assert count(graph)["tril"] == count(graph)["sin"] == 1
    assert count(made.graph)["tril"] == count(made.graph)["sin"] == 0 and CONSTANT in made.rules
    kept = [node.meta["constant"] for node in made.graph.graph.nodes if node.op == "get_attr"]
    assert any(torch.equal(value, torch.tril(torch.ones(8, 8)) * 0.5) for value in kept)


def test_what_the_model_joins_itself_is_merged() -> None:
    graph = Captures(job_of(Towers, 8, out=(8,))).of_size(32)
    made = rewrite(graph, CPU)
    forward = Counter(op_name(node.target) for node in made.graph.ops() if node.meta["phase"] == "forward")
    assert forward["addmm"] == 2  # all towers as one, the last layer
    assert forward["cat"] == 0 and forward["mul"] == 1
    assert parameters_beside(made.graph)[-1] == ("one", "two")


def test_convolutions_of_one_input_are_merged() -> None:
    """The lecture's second example."""
    graph = Captures(job_of(Convolutions, 4, 6, 6, out=(4, 6, 6))).of_size(32)
    made = rewrite(graph, CPU)
    assert parameters_beside(made.graph) == (("first.weight", "second.weight"),)
    assert count(made.graph)["convolution"] == 1 and count(made.graph)["cat"] == 0
    assert count(made.graph)["convolution_backward"] == 1
    assert list(made.rules) == ["convolutions of one input merge", "gradients of kernels on one image merge"]


def test_gradients_of_convolutions_are_merged_past_what_was_added_before() -> None:
    graph = Captures(job_of(Branches, 4, 5, 5, out=(4, 5, 5))).of_size(32)
    made = rewrite(graph, CPU)
    assert count(graph)["convolution_backward"] == 7 and count(made.graph)["convolution_backward"] == 3
    assert (
        count(made.graph)["convolution"] == 3 and "gradients of one image merge, from the right" in made.rules
    )


def test_orders_and_views_that_are_undone_vanish() -> None:
    graph = Captures(job_of(Orders, 4, 5, 6, out=(4, 5, 6))).of_size(32)
    made = rewrite(graph, CPU)
    assert count(graph)["permute"] == 4 and count(graph)["view"] >= 4
    assert count(made.graph)["permute"] == 0 and count(made.graph)["view"] <= 1


KERNELS = {
    "one and twenty-five": partial(Kernels, (1, 1), (5, 5), bias=False),
    "one, nine and twenty-five": partial(Kernels, (1, 1), (3, 3), (5, 5), bias=True),
    "rows and columns": partial(Kernels, (1, 3), (3, 1), bias=False),
    "a row and a square": partial(Kernels, (1, 3), (3, 3), bias=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_grow_to_merge(name: str) -> None:
    graph = Captures(job_of(KERNELS[name], 1, 4, 4, out=(1, 4, 4))).of_size(32)
    made = rewrite(graph, CPU)
    assert count(made.graph)["convolution"] == 2  # the first layer, and all branches as one
    assert count(made.graph)["constant_pad_nd"]


@pytest.mark.parametrize(
    ("model", "shape", "plan"),
    [
        (Towers, (8,), "single"),
        (Joined, (8,), "1f1b"),
        (Convolutions, (4, 6, 6), "zero3"),
        (Branches, (4, 5, 5), "ddp"),
        (Orders, (4, 5, 6), "ddp"),
        *((model, (1, 4, 4), "ddp") for model in KERNELS.values()),
        (Scores, (64, 8), "ddp"),
        (Masked, (8,), "ddp"),
        (Masked, (8,), "1f1b"),
    ],
)
def test_what_is_merged_computes_what_it_did(model: Any, shape: tuple[int, ...], plan: str) -> None:
    job = job_of(model, *shape, out=shape)
    before, after = (
        run_serially(job, with_settings(resolve(name, ranks), {"rewrite": way}), 2, torch.float64)
        for name, ranks, way in (("single", 1, "off"), (plan, 1 if plan == "single" else 2, "on"))
    )
    found = compare(before, after, rough=False, tolerance=1e-9, weight_tolerance=1e-9)
    assert found and all(difference.ok for difference in found)
    assert any(" ops became " in line for line in after.notices)


@cache
def plain() -> Record:
    plan = with_settings(resolve("single", 1), {"rewrite": "off"})
    return run_serially(language_job(), plan, 2, torch.float64)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("single", {"data": 1}),
        ("ddp", {"data": 2}),
        ("zero3", {"data": 2}),
        ("1f1b", {"pipe": 2}),
        ("megatron", {"tensor": 2}),
        ("megatron", {"data": 2, "tensor": 2}),
        ("megatron", {"domain": 2, "tensor": 2}),
    ],
)
def test_every_plan_computes_what_it_did(name: str, mesh: dict[str, int]) -> None:
    plan = resolve(name, None, {"rewrite": "on"}, mesh)
    record = run_serially(language_job(), plan, 2, torch.float64)
    found = compare(plain(), record, rough=False, tolerance=1e-9, weight_tolerance=1e-9)
    assert found and all(difference.ok for difference in found)
    assert any(" ops became " in line for line in record.notices)


@cache
def grouped() -> Graph:
    return Captures(replace(language_job(), model=lambda: Language(1, size=4, keys=8))).of_size(8)


def test_weights_that_are_cut_merge_where_they_have_one_shape() -> None:
    made = rewrite(grouped(), CPU, alike=True)
    beside = [
        {name.removeprefix("blocks.0.").partition(".")[0] for name in names}
        for names in parameters_beside(made.graph)
    ]
    assert {"k", "v"} in beside and {"gate", "up"} in beside
    assert not any("q" in names for names in beside)


def test_a_plan_takes_the_graph_that_it_places_better() -> None:
    """All of Q, K and V as one cannot be cut by heads where there are more queries than keys."""
    plan, kind = resolve("megatron", 2), DEVICES["cpu"]
    merged, alike = rewrite(grouped(), CPU), rewrite(grouped(), CPU, alike=True)
    assert " a rank holds " in better_as_written(grouped(), merged.graph, plan, kind, None)
    assert better_as_written(grouped(), alike.graph, plan, kind, None) == ""
    assert better_as_written(grouped(), merged.graph, resolve("ddp", 2), kind, None) == ""
    three = resolve("megatron", 3)  # divides nothing: the graph as written is no help either
    assert better_as_written(grouped(), merged.graph, three, kind, None)


def test_parameters_side_by_side_are_a_view_and_others_a_copy() -> None:
    memory = torch.arange(12.0)
    parts = [memory[:4].view(2, 2), memory[4:10].view(3, 2)]
    joined = run_beside(parts)
    assert joined.data_ptr() == memory.data_ptr() and torch.equal(joined, memory[:10].view(5, 2))
    apart = [parts[1], parts[0]]
    assert run_beside(apart).data_ptr() != memory.data_ptr()
    assert torch.equal(run_beside(apart), torch.cat(apart))


def test_a_graph_that_branches_stays() -> None:
    graph = replace(Captures(job_of(Wide, 8, out=(8,))).of_size(32), flags=("flag",))
    made = rewrite(graph, CPU)
    assert made.graph is graph and not made.changed and "branches" in made.line()
