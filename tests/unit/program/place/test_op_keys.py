"""Names of ops: stable, unique in a block, folded over blocks, and how entries find their ops."""

from collections import Counter

from tests.unit.program.compiled import graph_of

from plait.program.place.op_keys import exact_keys, find_blocks, fold_path, op_keys, pins_of
from plait.program.place.placement import P, R, Shard, Strategy


def test_every_op_has_a_key_of_its_own() -> None:
    keys = exact_keys(graph_of("gpt", 4))
    assert len(set(keys.values())) == len(keys)
    assert "blocks.1.mlp.0 forward addmm 1" in keys.values()


def test_repeated_blocks_share_keys_and_layers_in_a_row_do_not() -> None:
    counts = Counter(op_keys(graph_of("gpt", 4)).values())
    assert counts["blocks.*.mlp.0 forward addmm 1"] == 2
    assert counts["blocks.*.mlp.2 forward addmm 1"] == 2
    assert set(Counter(op_keys(graph_of("mlp", 4)).values()).values()) == {1}


def test_keys_do_not_depend_on_the_size_of_the_batch() -> None:
    small, large = (set(exact_keys(graph_of("gpt_tied", size)).values()) for size in (4, 6))
    assert small == large


def test_only_the_numbers_of_blocks_are_folded() -> None:
    blocks = find_blocks(graph_of("gpt", 4))
    assert fold_path("blocks.1.mlp.2.weight", blocks) == "blocks.*.mlp.2.weight"
    assert fold_path("norm.weight", blocks) == "norm.weight"


def test_the_entry_of_one_block_comes_before_that_of_all_and_that_before_a_pattern() -> None:
    graph = graph_of("gpt", 4)
    entries = (
        ("blocks* forward addmm *", "R R R -> R"),
        ("blocks.*.mlp.0 forward addmm 1", "S(0) R S(1) -> S(1)"),
        ("blocks.1.mlp.0 forward addmm 1", "P S(1) S(0) -> P"),
    )
    pins = {exact_keys(graph)[node]: strategy for node, strategy in pins_of(graph, entries).items()}
    assert pins["blocks.0.mlp.0 forward addmm 1"] == Strategy((Shard(0), R, Shard(1)), (Shard(1),))
    assert pins["blocks.1.mlp.0 forward addmm 1"] == Strategy((P, Shard(1), Shard(0)), (P,))
    assert pins["blocks.1.mlp.2 forward addmm 1"] == Strategy((R, R, R), (R,))
    assert len(pins) == 8
