"""What runs again in the backward: where it stands, what is kept, and that no choice keeps fewer bytes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from tests.unit.program.compiled import graph_of
from torch import fx

from plait.api.inputs.settings import parse_settings
from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.graph.storage import is_item, shows_input, storage_bytes
from plait.plan.decisions import Memory
from plait.plan.named import resolve
from plait.plan.plan import Plan, read_plan
from plait.program.compile import compile_program
from plait.program.instructions import Commit, Compute
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.place import place
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.program.segment.cut import is_collective
from plait.program.segment.recompute import (
    Again,
    compare,
    forward_nodes,
    frontier,
    is_backward,
    recompute,
)
from plait.program.segment.recompute_choice import _is_dear, _tensors, choose
from plait.program.stage.stages import assign_stages
from plait.search.place.resolve import resolve_placements

SIZE = 8
SETTINGS = Settings(clip_norm=1.0, batch_norm="global", device=torch.device("cpu"))


def local_of(graph: Graph, plan: Plan) -> LocalGraph:
    """The local graph of rank 0."""
    resolved = resolve_placements(graph, plan)[0]
    placed = place(graph, resolved, (SIZE // plan.data_ranks,) * plan.data_ranks)
    return localize(graph, placed, (0,) * len(placed), local_batch_norm=False)


def saved(local: LocalGraph) -> set[fx.Node]:
    """What the backward reads of the forward."""
    return {node for node in forward_nodes(local) if any(is_backward(user) for user in node.users)}


def program_of(name: str, plan: Plan, micro_batches: tuple[int, ...] = (SIZE,)) -> Program:
    graph = graph_of(name, micro_batches[0])
    resolved = resolve_placements(graph, plan)[0]
    return compile_program({micro_batches[0]: graph}, resolved, micro_batches, SETTINGS)


def keeping(plan: Plan, recompute: str | tuple[str, ...]) -> Plan:
    return replace(plan, memory=replace(plan.memory, recompute=recompute))


@pytest.mark.parametrize("setting", ["full", "selective", ("blocks.*.mlp", "head")])
def test_copies_stand_right_before_their_first_reader(setting: str | tuple[str, ...]) -> None:
    graph = graph_of("gpt_dropout", SIZE)
    local = local_of(graph, resolve("single", 1))
    before = {node.name: node.meta for node in local.graph.nodes}
    recompute(graph, local, choose(graph, local, setting))
    nodes = list(local.graph.nodes)
    place_of = {node: index for index, node in enumerate(nodes)}
    copies = [node for node in nodes if node.name not in before]
    assert copies
    for copy in copies:
        original = before[copy.name.removesuffix("_again")]
        assert copy.meta["phase"] == "backward"
        assert all(copy.meta[key] == original[key] for key in ("lowers", "origin", "module", "source"))
        first = min(place_of[user] for user in copy.users)
        between = nodes[place_of[copy] + 1 : first]
        assert all(node in copies for node in between), copy
    local.graph.lint()


def test_full_keeps_the_inputs_of_blocks_alone() -> None:
    graph = graph_of("gpt", SIZE)
    local = local_of(graph, resolve("single", 1))
    recompute(graph, local, choose(graph, local, "full"))
    inside = [node for node in saved(local) if node.meta["module"].startswith("blocks.")]
    assert len(inside) == 2, "the output of each block, which the next one or the last norm reads"
    assert all(node.target is torch.ops.aten.add.Tensor for node in inside)


def test_named_modules_keep_their_inputs() -> None:
    graph = graph_of("gpt", SIZE)
    local = local_of(graph, resolve("single", 1))
    elsewhere = {node.name for node in saved(local) if not node.meta["module"].startswith("blocks.0")}
    recompute(graph, local, choose(graph, local, ("?locks.0",)))
    kept = {node.name for node in saved(local)}
    assert elsewhere <= kept
    assert sum(node.meta["module"].startswith("blocks.0") for node in saved(local)) == 1


def subsets(nodes: list[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    return chain.from_iterable(combinations(nodes, count) for count in range(len(nodes) + 1))


def bytes_kept(local: LocalGraph, dropped: set[fx.Node]) -> int:
    """Bytes of forward values that the backward and what runs again in it read, views through to what they show."""
    stack = list(saved(local))
    seen: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if shows_input(node):
            stack.append(node.all_input_nodes[0])
        elif node in dropped or (is_item(node) and node.args[0] in dropped):
            stack += node.all_input_nodes
        else:
            kept.add(node)
    return sum(storage_bytes(tensor) for node in kept for tensor in _tensors(node))


@pytest.mark.parametrize("name", ["mlp", "contrastive", "moe_dense", "small_batch_norm"])
def test_no_choice_of_cheap_ops_keeps_fewer_bytes(name: str) -> None:
    """Against all of them."""
    graph = graph_of(name, SIZE)
    local = local_of(graph, resolve("single", 1))
    bound = frontier(graph, local, None)
    lookups = {node.name for node in graph.ops() if node.target is torch.ops.aten.embedding.default}
    free = [
        node
        for node in forward_nodes(local)
        if node not in bound and not _is_dear(node, lookups) and not shows_input(node) and not is_item(node)
    ]
    assert 2 <= len(free) <= 13
    best = min(bytes_kept(local, set(chosen)) for chosen in subsets(free))
    chosen = choose(graph, local, "selective").nodes
    found = bytes_kept(local, {node for node in forward_nodes(local) if node.name in chosen})
    assert found == best
    assert best < bytes_kept(local, set())


def test_selective_runs_no_product_again() -> None:
    plan = resolve("single", 1)
    without = program_of("gpt", plan)
    effect = compare(program_of("gpt", keeping(plan, "selective")), without)
    assert effect.added_flops == (0,)
    assert effect.saved_bytes[0] > 0.2 * effect.kept_bytes[0]
    assert "of activations saved" in str(effect)


@pytest.mark.parametrize(
    ("name", "plan"), [("gpt", "megatron"), ("resnet_bn", "ddp"), ("unet", "domain"), ("gpt", "domain")]
)
@pytest.mark.parametrize("setting", ["full", "selective"])
def test_nothing_is_communicated_twice(name: str, plan: str, setting: str) -> None:
    graph = graph_of(name, SIZE)
    local = local_of(graph, resolve(plan, 2))
    before = [node.name for node in local.graph.nodes if is_collective(node)]
    assert before
    recompute(graph, local, choose(graph, local, setting))
    assert [node.name for node in local.graph.nodes if is_collective(node)] == before


@pytest.mark.parametrize("plan", ["single", "1f1b"])
def test_new_buffers_come_from_the_forward_once(plan: str) -> None:
    ranks = 1 if plan == "single" else 2
    program = program_of("resnet_bn", keeping(resolve(plan, ranks), "full"), (4, 4))
    for rank in range(ranks):
        own = program.of(rank)
        commits = [i for i in own.instructions if isinstance(i, Commit)]
        for commit in commits:
            assert not any("_again" in name for name in commit.reads)
        makers = {
            name: own.segments[i.segment].phase
            for i in own.instructions
            if isinstance(i, Compute)
            for name in i.writes
        }
        assert commits
        assert {makers[name] for commit in commits for name in commit.reads} == {"forward"}


def test_what_other_stages_read_is_kept() -> None:
    graph = graph_of("gpt", SIZE)
    stages = assign_stages(graph, 2)
    placed = place(graph, resolve("single", 1), (SIZE,))
    local = localize(graph, placed, (0,) * len(placed), local_batch_norm=False, stages=stages)
    of = {node.name: found for node, found in stages.of.items()}
    read_elsewhere = {
        node.name
        for node in forward_nodes(local)
        for user in node.users
        if user.op == "call_function" and not set(of[user.meta["lowers"]]) <= set(of[node.meta["lowers"]])
    }
    assert read_elsewhere
    assert not read_elsewhere & choose(graph, local, "full", stages).nodes


def test_a_rank_without_samples_runs_the_same_ops_again() -> None:
    """Its local graph has other nodes: it goes by the ops that they stand for."""
    graph = graph_of("gpt", 3)
    (placed,) = place(graph, resolve("ddp", 4), (1, 1, 1, 0))
    again: Again | None = None
    found = []
    for rank in (0, 3):
        local = localize(graph, (placed,), (rank,), local_batch_norm=False)
        again = choose(graph, local, "full") if again is None else again
        names = {node.name for node in local.graph.nodes}
        recompute(graph, local, again)
        copies = [node for node in local.graph.nodes if node.name not in names]
        found.append({node.meta["lowers"] for node in copies if not is_item(node)})
    assert found[1] >= {name for name in found[0] if "mm" in name}


def test_unknown_modules_are_named() -> None:
    graph = graph_of("gpt", SIZE)
    local = local_of(graph, resolve("single", 1))
    with pytest.raises(PlanError, match=r"h\.\*\.mlp.*no module") as caught:
        choose(graph, local, ("blocks.*", "h.*.mlp"))
    assert "blocks.0" in str(caught.value.fix)


@pytest.mark.parametrize("value", ["always", "", [], [1], 3, None, True])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"memory\.recompute") as caught:
        Memory(recompute=value)  # type: ignore[arg-type]
    assert "selective" in str(caught.value.fix)


@pytest.mark.parametrize("text", ["none", "selective", "full", "[h.*.mlp, head]"])
def test_plan_files_and_options_take_it(text: str, tmp_path: Path) -> None:
    settings = parse_settings([f"memory.recompute={text}"])
    plan = resolve("single", 1, settings)
    wanted = ("h.*.mlp", "head") if text.startswith("[") else text
    assert plan.memory.recompute == wanted
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert read_plan(tmp_path / "plan.yaml") == plan
