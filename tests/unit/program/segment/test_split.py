"""What stages send each other, and which of their ops only gradients of parameters need."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import graph_of

from plait.plan.named import resolve
from plait.program.compile import compile_program
from plait.program.instructions import Recv, Send
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.place import place
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.program.segment.split import StageGraph, split
from plait.program.stage.stages import assign_stages

aten = torch.ops.aten


@cache
def parts_of(
    name: str, num_stages: int, cut: tuple[str, ...] = (), ranks: int = 0, size: int = 4
) -> tuple[LocalGraph, tuple[StageGraph, ...]]:
    graph = graph_of(name, size)
    stages = assign_stages(graph, num_stages, cut)
    chosen = place(graph, resolve("single", 1), (size,))
    local = localize(graph, chosen, (0,), local_batch_norm=False, stages=stages)
    return local, split(local, stages, ranks or num_stages)


@cache
def program_of(plan: str, name: str, ranks: int, micro_batches: tuple[int, ...] = (2, 2, 2)) -> Program:
    graphs = {size: graph_of(name, size) for size in set(micro_batches)}
    settings = Settings(clip_norm=1.0, batch_norm="global", device=torch.device("cpu"))
    return compile_program(graphs, resolve(plan, ranks), micro_batches, settings)


def sent(local: LocalGraph, parts: Sequence[StageGraph]) -> dict[str, list[tuple[str, int, int]]]:
    """Every value that is sent -> (direction, from, to)."""
    found: dict[str, list[tuple[str, int, int]]] = {}
    for part in parts:
        for (direction, to), names in part.sends.items():
            for name in names:
                found.setdefault(name, []).append((direction, part.stage, to))
    return found


@pytest.mark.parametrize("name", ["gpt_tied", "unet", "hf_bert", "moe_capacity"])
def test_what_is_sent_is_received(name: str) -> None:
    _, parts = parts_of(name, 4)
    sends = {(w, p.stage, to): names for p in parts for (w, to), names in p.sends.items()}
    receives = {(w, source, p.stage): names for p in parts for (w, source), names in p.receives.items()}
    assert sends == receives
    assert all(names for names in sends.values())
    for direction, source, to in sends:
        assert (source < to) == (direction == "forward")


# --- messages -----------------------------------------------------------------------------------------------


def test_skip_connections_go_straight_to_where_they_are_used() -> None:
    """UNet: the features of `down1` are read beside those of `up1`, three stages on; nobody between receives them."""
    local, parts = parts_of("unet", 4, ("down2", "up2", "up1"))
    by_name = {node.name: node for node in local.graph.nodes}
    relu = next(
        node.name
        for node in parts[0].forward
        if node.target is aten.relu.default and node.meta.get("module", "") in ("", "down1")
    )
    routes = [route for route in sent(local, parts)[relu] if route[0] == "forward"]
    assert ("forward", 0, 3) in routes
    for _, source, to in routes:
        assert source == 0
        users = {user for user in by_name[relu].users if user in (*parts[to].forward, *parts[to].backward)}
        assert users, f"stage {to} gets it for nothing"


@pytest.mark.parametrize("name", ["gpt_dropout", "masked_gpt", "hf_bert", "hf_llama", "hf_t5"])
def test_what_depends_on_the_batch_alone_is_never_sent(name: str) -> None:
    """Masks, positions, targets, random numbers: whoever needs them computes them."""
    local, parts = parts_of(name, 4)
    by_name = {node.name: node for node in local.graph.nodes}
    names = {entry.node for entry in graph_of(name, 4).inputs if entry.kind in ("parameter", "buffer")}

    def learned(node: Any, seen: set[Any]) -> bool:
        if node in seen:
            return False
        seen.add(node)
        if node.op == "placeholder":
            return node.name in names
        return any(learned(source, seen) for source in node.all_input_nodes)

    routes = sent(local, parts)
    assert routes
    assert [name for name in routes if not learned(by_name[name], set())] == []


def test_dropout_masks_are_drawn_again_where_they_are_needed_or_kept_there() -> None:
    local, parts = parts_of("gpt_dropout", 4)
    by_name = {node.name: node for node in local.graph.nodes}
    kinds = {by_name[name].meta["val"].dtype for name in sent(local, parts)}
    assert kinds == {torch.float64}


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "hf_t5", "unet", "moe_dense"])
def test_views_are_not_sent_larger_than_what_they_show(name: str) -> None:
    """An expanded tensor (a bias for a batch, keys for several heads) is expanded where it is read."""
    local, parts = parts_of(name, 8, ranks=8)
    by_name = {node.name: node for node in local.graph.nodes}
    for value in sent(local, parts):
        node = by_name[value]
        if node.target in (aten.expand.default, aten.broadcast_to.default):
            assert node.meta["val"].numel() <= node.all_input_nodes[0].meta["val"].numel()


@pytest.mark.parametrize("name", ["unet", "gpt_tied", "hf_bert"])
@pytest.mark.parametrize("plan", ["1f1b", "zero-bubble", "interleaved"])
def test_one_message_a_pair_of_stages_and_micro_batch_and_direction(plan: str, name: str) -> None:
    program = program_of(plan, name, 4)
    for rank in range(4):
        own = program.of(rank).instructions
        for kind in (Send, Recv):
            counts = Counter(i.message for i in own if isinstance(i, kind) and "micro-batch" in i.message)
            assert counts
            assert set(counts.values()) == {1}


def test_a_rank_with_two_stages_is_told_nothing_twice() -> None:
    """Of two stages of a rank that read one value, the first receives it."""
    _, parts = parts_of("moe_capacity", 8, ranks=4, size=7)
    apart = parts_of("moe_capacity", 8, ranks=8, size=7)[1]
    assert sum(len(n) for p in parts for n in p.sends.values()) < sum(
        len(n) for p in apart for n in p.sends.values()
    )
    for direction in ("forward", "backward"):
        for rank in range(4):
            names = [
                name
                for part in parts
                if part.stage % 4 == rank
                for (way, source), found in part.receives.items()
                if way == direction and source % 4 != rank
                for name in found
            ]
            assert len(names) == len(set(names))


def test_receives_are_posted_before_they_are_needed() -> None:
    """One action ahead: the message travels while the rank still computes."""
    own = program_of("1f1b", "gpt_tied", 4).of(1).instructions
    early = 0
    for instruction in own:
        if isinstance(instruction, Recv) and "forward" in instruction.message:
            wait = next(i for i in own if getattr(i, "of", None) == instruction.id)
            early += any(type(i).__name__ == "Compute" for i in own[instruction.id : wait.id])
    assert early > 0


# --- gradients of activations and of parameters -------------------------------------------------------------


def kinds(nodes: Sequence[Any]) -> Counter[str]:
    return Counter(node.target.__name__ for node in nodes)


def test_the_two_products_of_a_linear_layer_come_apart() -> None:
    """Stage 1 of the MLP has one layer: dx = dy W for stage 0, dW = dyT x for nobody, db = sum dy for nobody."""
    _, parts = parts_of("mlp", 3, ("2", "4"))
    middle = parts[1]
    assert kinds(middle.inputs)["mm.default"] == 1
    assert kinds(middle.weights)["mm.default"] == 1
    assert kinds(middle.weights)["sum.dim_IntList"] == 1
    assert [n for n in middle.backward if n in middle.inputs or n in middle.weights] == list(middle.backward)
    assert set(middle.sends["backward", 0]) <= {node.name for node in middle.inputs}


def test_the_first_stage_waits_for_nobody() -> None:
    """Whatever its own first layer makes is for the weights."""
    _, parts = parts_of("mlp", 3, ("2", "4"))
    assert not any(direction == "backward" for direction, _ in parts[0].sends)
    assert kinds(parts[0].weights)["mm.default"] == 1


def test_a_layer_norm_stays_in_one_piece() -> None:
    """One op makes the gradients of its input and of its parameters: its outputs stay with it."""
    _, parts = parts_of("gpt", 2, ("blocks.1",))
    for part in parts:
        norms = [node for node in part.backward if node.target is aten.native_layer_norm_backward.default]
        assert norms
        weights = set(part.weights)
        for node in norms:
            assert node not in weights
            assert not weights & set(node.users)


@pytest.mark.parametrize("name", ["gpt_tied", "unet", "resnet_bn", "lstm", "hf_bert"])
def test_nobody_who_is_waited_for_reads_what_is_made_later(name: str) -> None:
    _, parts = parts_of(name, 4)
    for part in parts:
        late = set(part.weights)
        for node in part.inputs:
            assert not late & set(node.all_input_nodes), node
        leaving = {n for (way, _), names in part.sends.items() if way == "backward" for n in names}
        assert not leaving & {node.name for node in late}
        assert len(part.inputs) + len(part.weights) == len(part.backward)


def test_the_loss_is_computed_on_the_last_stage_alone() -> None:
    _, parts = parts_of("gpt", 4)
    assert [part.has_total for part in parts] == [False, False, False, True]


def test_buffers_are_changed_by_the_stage_of_their_layer() -> None:
    _, parts = parts_of("resnet_bn", 4)
    changed = [set(part.new_buffers) for part in parts]
    assert sum(map(len, changed)) == len(set().union(*changed)) > 20
    assert "1.running_mean" in changed[0]
    assert any(name.startswith("10.") for name in changed[3])
