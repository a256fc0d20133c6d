"""Classes of equal ops: all nodes in exactly one, and only like with like."""

import pytest
from tests.unit.search.flows import flow_of

from plait.search.place.folding import fold


@pytest.mark.parametrize("name", ["mlp", "gpt", "small_batch_norm"])
def test_every_input_and_op_is_in_one_class(name: str) -> None:
    flow = flow_of(name, 2)
    members = [node for entry in fold(flow, {}) for node in entry.nodes]
    inputs = [node for node in flow.graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    assert len(members) == len(set(members)) and set(members) == {*inputs, *flow.ops}


def test_the_blocks_of_a_gpt_are_one() -> None:
    flow = flow_of("gpt", 2)
    folded, apart = fold(flow, {}), fold(flow, {}, blocks=False)
    assert all(len(entry.nodes) == 1 for entry in apart)
    in_blocks = [entry for entry in folded if entry.key.startswith("blocks.*")]
    assert in_blocks and all(len(entry.nodes) == 2 for entry in in_blocks)


def test_blocks_of_other_widths_are_apart() -> None:
    """The eight blocks of a ResNet have the same names and four widths."""
    classes = [entry for entry in fold(flow_of("resnet_bn", 2), {}) if entry.key == "*.conv2.weight"]
    assert [len(entry.nodes) for entry in classes] == [2, 2, 2, 2]
    shapes = [{tuple(node.meta["val"].shape) for node in entry.nodes} for entry in classes]
    assert all(len(found) == 1 for found in shapes)


def test_what_is_given_for_one_block_keeps_it_apart() -> None:
    flow = flow_of("gpt", 2)
    node = next(n for n, name in flow.parameters.items() if name == "blocks.0.mlp.0.weight")
    classes = [entry for entry in fold(flow, {node: "S(0)"}) if entry.key == "blocks.*.mlp.0.weight"]
    assert [len(entry.nodes) for entry in classes] == [1, 1]
