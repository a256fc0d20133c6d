"""The pattern on models that know nothing of it: which weights are cut, how, and what is said where they cannot be."""

import pytest
from tests.unit.search.flows import along, flow_of, graph_of_layers, pattern_of
from torch import nn

from plait.errors import PlanError
from plait.program.place.placement import R, Shard
from plait.search.place.cost import flow_cost
from plait.search.place.megatron import describe, megatron, require_use


def cut_of(name: str, ranks: int) -> dict[str, str]:
    """The parameters that are cut."""
    flow = flow_of(name, ranks)
    return {flow.parameters[node]: str(p) for node, p in pattern_of(name, ranks).parameters.items()}


def test_fused_attention_and_mlp_of_a_gpt() -> None:
    block = {
        "attention.qkv.weight": "S(0/3)", "attention.qkv.bias": "S(0/3)", "attention.out.weight": "S(1)",
        "mlp.0.weight": "S(0)", "mlp.0.bias": "S(0)", "mlp.2.weight": "S(1)",
    }  # fmt: skip
    expected = {f"blocks.{i}.{name}": text for i in (0, 1) for name, text in block.items()}
    assert cut_of("gpt_tied", 2) == expected | {"tokens.weight": "S(0)"}
    assert cut_of("gpt", 4) == expected | {"tokens.weight": "S(0)", "head.weight": "S(0)"}


def test_grouped_queries_and_a_gated_mlp() -> None:
    cut = cut_of("hf_llama", 2)
    rows = {"self_attn.o_proj", "mlp.down_proj"}
    columns = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert all(cut[f"model.layers.{i}.{name}.weight"] == "S(0)" for i in (0, 1) for name in columns)
    assert all(cut[f"model.layers.{i}.{name}.weight"] == "S(1)" for i in (0, 1) for name in rows)
    assert len(cut) == 2 * 7 + 2


def test_weights_that_are_stored_the_other_way_round() -> None:
    """Hugging Face's Conv1D holds the inputs on dim 0."""
    cut = cut_of("hf_gpt2", 2)
    assert cut["transformer.h.0.attn.c_attn.weight"] == "S(1/3)"
    assert cut["transformer.h.0.attn.c_proj.weight"] == "S(0)"
    assert cut["transformer.wte.weight"] == "S(0)"


@pytest.mark.parametrize("name", ["gpt", "gpt_tied", "gpt_dropout", "hf_llama"])
def test_four_all_reduces_a_layer(name: str) -> None:
    """And one each for the embedding and the output layer."""
    cost = flow_cost(flow_of(name, 2), pattern_of(name, 2).placements)
    assert cost.collectives == {"all_reduce": 4 * 2 + 2}


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_dropout", "hf_llama"])
def test_positions_cut_between_the_layers(name: str) -> None:
    """What is left of all-reduces are gradients of norms and positions, a vector or a table each."""
    flow = flow_of(name, 2)
    whole, pieces = (pattern_of(name, 2, sequence=flag) for flag in (False, True))
    assert pieces.parameters == whole.parameters
    before, after = flow_cost(flow, whole.placements), flow_cost(flow, pieces.placements)
    assert after.collectives["reduce_scatter"] == before.collectives["all_reduce"]
    assert after.num_bytes < 1.1 * before.num_bytes
    assert after.memory_bytes < before.memory_bytes
    norms = [n for n in flow.ops if "layer_norm" in str(n.target)]
    assert all(pieces.placements.strategies[n].inputs[0] == Shard(1) for n in norms)


def test_plain_layers_alternate() -> None:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    flow = along(graph_of_layers(*layers, width=16), 4)
    pattern = megatron(flow, {}, {})
    assert [str(pattern.placements.of(node)) for node in flow.parameters] == ["S(0)", "S(1)", "S(0)", "S(1)"]


def test_channels_of_convolutions_alternate() -> None:
    cut = cut_of("alexnet", 2)
    weights = [cut.get(f"{i}.weight") for i in (0, 3, 6, 8, 10, 15, 18, 20)]
    assert weights == ["S(0)", "S(1)"] * 4


def test_the_two_convolutions_of_a_residual_block() -> None:
    cut = cut_of("resnet_bn", 2)
    assert {cut[f"{i}.conv1.weight"] for i in range(3, 11)} == {"S(0)"}
    assert {cut[f"{i}.conv2.weight"] for i in range(3, 11)} == {"S(1)"}
    assert cut["3.norm1.weight"] == "S(0)" and "3.norm2.weight" not in cut and "0.weight" not in cut


def test_heads_that_do_not_divide_stay_whole_and_are_told() -> None:
    """Four heads on eight ranks: the MLPs are cut, attention is not."""
    flow, pattern = flow_of("gpt", 8), pattern_of("gpt", 8)
    assert cut_of("gpt", 8)["blocks.0.mlp.0.weight"] == "S(0)"
    assert "blocks.0.attention.qkv.weight" not in cut_of("gpt", 8)
    said = describe(pattern.blocked[0], flow)
    assert said.startswith("blocks.0.attention.qkv: aten.view (blocks.0.attention ")
    assert "zoo.py:" in said and said.endswith("8 shards S(2) of [4, 8, 32] to [4, 8, 4, 8]")


def test_an_axis_that_nothing_can_use_is_refused() -> None:
    flow = flow_of("mlp", 3)
    with pytest.raises(
        PlanError, match=r"axis tensor=3: nothing can use it: 0: aten.addmm .*3 does not divide 32"
    ) as e:
        require_use(flow, pattern_of("mlp", 3))
    assert e.value.fix is not None and "data=3" in e.value.fix


def test_what_is_fixed_stays() -> None:
    flow = flow_of("gpt", 2)
    names = {name: node for node, name in flow.parameters.items()}
    fixed = {names["blocks.0.mlp.0.weight"]: R}
    pattern = megatron(flow, fixed, {})
    assert pattern.placements.of(names["blocks.0.mlp.0.weight"]) == R
    assert pattern.placements.of(names["blocks.0.mlp.2.weight"]) == R
    assert pattern.placements.of(names["blocks.1.mlp.0.weight"]) == Shard(0)
