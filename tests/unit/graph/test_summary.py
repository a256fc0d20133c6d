"""What a summary says of a graph: counted as torch counts, each byte once."""

import functools
import json
import warnings
from collections import Counter

import pytest
import torch
from tests.zoo import ZOO
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.show.summary import kept_for_backward, memory_root, summarize, to_json

NUM_SAMPLES = 6
CAPTURABLE = sorted(name for name, case in ZOO.items() if case.capturable)


@functools.cache
def captured(name: str) -> Graph:
    return Captures(ZOO[name].job()).of_size(NUM_SAMPLES)


def eager_flops(name: str) -> tuple[int, int]:
    """What torch's counter counts, forward and backward, where each op runs on a kernel that it knows.

    It counts 0 for the CPU kernels of flash attention and of oneDNN's LSTM, so these are switched off.
    """
    case = ZOO[name]
    job, batch = case.job(), case.samples(NUM_SAMPLES, 7)
    model = job.build_model().train()
    with (
        warnings.catch_warnings(action="ignore"),  # torch warns of TF32 whenever oneDNN is switched
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
    ):
        with FlopCounterMode(display=False) as forward:
            result = job.objective_of(model, batch)
        total = result[0] if isinstance(result, tuple) else result
        with FlopCounterMode(display=False) as backward:
            total.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def recomputed_scores(graph: Graph) -> int:
    """FLOPs of q k^T in every attention backward: fused kernels do not keep the scores, and torch counts that too."""
    flops = 0
    for node in graph.ops():
        if node.target is torch.ops.plait.attention_backward.default:
            q, k = node.args[1].meta["val"], node.args[2].meta["val"]  # type: ignore[union-attr]
            flops += 2 * q.numel() * k.shape[2]
    return flops


@pytest.mark.parametrize("name", CAPTURABLE)
def test_flops_agree_with_torchs_counter(name: str) -> None:
    graph = captured(name)
    summary = summarize(graph)
    forward, backward = eager_flops(name)
    assert summary.forward_flops == forward
    assert summary.backward_flops == backward + recomputed_scores(graph)


def test_activation_bytes_of_an_mlp_by_hand() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    summary = summarize(Captures(ZOO["mlp"].job(model=model)).of_size(NUM_SAMPLES))
    relu, log_softmax, weight_of_the_loss = NUM_SAMPLES * 32 * 4, NUM_SAMPLES * 10 * 4, 4
    assert summary.activation_bytes == relu + log_softmax + weight_of_the_loss
    assert [activation.num_bytes for activation in summary.largest_activations] == [relu, log_softmax, 4]
    assert summary.largest_activations[0].module == "1"
    assert summary.largest_activations[0].shape == (NUM_SAMPLES, 32)


def test_views_of_one_tensor_are_counted_once() -> None:
    graph = captured("gpt")
    read = [
        node
        for node in graph.ops()
        if node.meta["phase"] == "forward"
        and node.meta["module"] == "blocks.0.attention"
        and any(user.meta.get("phase") == "backward" for user in node.users)
        and memory_root(node)[0].meta["module"] == "blocks.0.attention.qkv"
    ]
    assert len(read) == 3  # q, k and v
    ((root, _),) = {memory_root(node) for node in read}
    assert kept_for_backward(graph)[root, None] == NUM_SAMPLES * 8 * 96 * 4


def test_a_tied_parameter_is_counted_once() -> None:
    plain, tied = summarize(captured("gpt")), summarize(captured("gpt_tied"))
    assert plain.num_parameters == sum(parameter.numel() for parameter in ZOO["gpt"].model().parameters())
    assert plain.num_parameters - tied.num_parameters == 32 * 32
    assert tied.tied == {"head.weight": "tokens.weight"}
    assert tied.num_ops["update"] == plain.num_ops["update"] - 1
    assert tied.parameter_bytes == 4 * tied.num_parameters


def test_frozen_parameters_are_told_apart() -> None:
    def model() -> nn.Module:
        network = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 10))
        network[0].requires_grad_(False)
        return network

    summary = summarize(Captures(ZOO["mlp"].job(model=model)).of_size(NUM_SAMPLES))
    assert summary.num_parameters == 16 * 8 + 8 + 8 * 10 + 10
    assert summary.num_trainable == 8 * 10 + 10
    assert [update.parameter for update in summary.updates] == ["1.weight", "1.bias"]


def test_unused_parameters_are_named() -> None:
    assert summarize(captured("unused_parameter")).unused == ("forgotten.weight", "forgotten.bias")


def test_modules_add_up_and_equal_layers_are_one_entry() -> None:
    summary = summarize(captured("gpt"))
    costs = {cost.path: cost for cost in summary.modules}
    layers = costs["blocks.{0-1}"]
    assert "blocks" not in costs, "a wrapper says nothing that its layers do not"
    assert layers.count == 2
    inside = [
        cost for path, cost in costs.items() if path.startswith("blocks.{0-1}.") and path.count(".") == 2
    ]
    assert {cost.path.rpartition(".")[2] for cost in inside} == {"norm1", "attention", "norm2", "mlp"}
    assert sum(cost.forward_flops for cost in inside) == layers.forward_flops
    assert sum(cost.num_parameters for cost in inside) == layers.num_parameters
    top = [
        cost
        for path, cost in costs.items()
        if path in ("tokens", "positions", "blocks.{0-1}", "norm", "head")
    ]
    assert sum(cost.forward_flops for cost in top) == summary.forward_flops
    assert sum(cost.backward_flops for cost in top) == summary.backward_flops
    assert sum(cost.num_parameters for cost in top) == summary.num_parameters
    assert summary.modules[0] is layers


def test_different_layers_stay_apart() -> None:
    paths = {cost.path for cost in summarize(captured("resnet_bn")).modules}
    assert "{3-4}" in paths
    assert {"5", "6"} <= paths  # the same class, other widths


@pytest.mark.parametrize("name", CAPTURABLE)
def test_every_op_has_a_family(name: str) -> None:
    summary = summarize(captured(name))
    unknown = {op["target"] for op in to_json(captured(name))["ops"] if op["family"] == "other"}
    assert not unknown
    assert sum(summary.families.values()) == summary.num_ops["forward"] + summary.num_ops["backward"]


def test_the_listing_is_json_and_complete() -> None:
    graph = captured("gpt_tied")
    listing = json.loads(json.dumps(to_json(graph)))
    known = {entry["name"] for entry in listing["inputs"]}
    for op in listing["ops"]:
        assert set(op["inputs"]) <= known
        known.add(op["name"])
        assert len(op["shapes"]) == len(op["dtypes"])
    phases = Counter(op["phase"] for op in listing["ops"])
    assert phases["forward"] + phases["backward"] == len(list(graph.ops()))
    assert phases["update"] == len(graph.gradients)
    summary = summarize(graph)
    assert sum(op["flops"] for op in listing["ops"]) == summary.forward_flops + summary.backward_flops
    update = next(op for op in listing["ops"] if op["name"] == "update:tokens.weight")
    assert update["bytes"] == 2 * 32 * 32 * 4
    assert update["state_bytes"] is None
    assert update["inputs"] == [listing["outputs"]["gradients"]["tokens.weight"]]


def test_views_have_no_bytes_of_their_own() -> None:
    ops = to_json(captured("gpt"))["ops"]
    views = [op for op in ops if op["family"] == "view"]
    assert views
    assert all(op["bytes"] == 0 for op in views)
    assert all(op["bytes"] > 0 for op in ops if op["family"] == "matmul")
