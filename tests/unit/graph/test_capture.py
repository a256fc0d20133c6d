"""The captured graph computes what the model computes, and knows where each op came from."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import OPTIMIZERS, ZOO, Case, vectors
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from plait.errors import CaptureError
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.ops.random import random_key
from plait.job.job import Job

NUM_SAMPLES = 6
CAPTURABLE = sorted(name for name, case in ZOO.items() if case.capturable)
EXACT = [name for name in CAPTURABLE if not ZOO[name].dropout]


def double(value: Any) -> Any:
    """The same with float64 for every floating tensor."""
    return pytree.tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, value
    )


def in_double(case: Case) -> Job:
    """The case's job, its model and loss in float64."""
    job = case.job(batch=NUM_SAMPLES)
    if not isinstance(job.loss, nn.Module):
        return job
    return case.job(batch=NUM_SAMPLES, loss=copy.deepcopy(job.loss).double())


@functools.cache
def captured(name: str) -> Graph:
    """The graph of a zoo case in float64, captured once for all tests."""
    return Captures(ZOO[name].job(batch=NUM_SAMPLES), dtype=torch.float64).of_size(NUM_SAMPLES)


def execute(graph: Graph, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run the graph on real tensors: total, weight; gradients of the total and new buffers, by name."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    leaves = iter(graph.batch.tensors(batch))
    values = []
    for entry in graph.inputs:
        if entry.kind in ("parameter", "buffer"):
            values.append(held[entry.name].detach())
        elif entry.kind == "batch":
            values.append(next(leaves))
        elif entry.kind == "key":
            values.append(random_key(seed=0, step=0))
        else:
            values.append(torch.ones((), dtype=graph.nodes()[entry.node].meta["val"].dtype))
    root = nn.Module()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            setattr(root, str(node.target), double(node.meta["constant"]))
    names = [*graph.new_buffers, *graph.gradients]
    with torch.no_grad():
        total, weight, *rest = fx.Interpreter(fx.GraphModule(root, graph.graph)).run(*values)
    return total, weight, dict(zip(names, rest, strict=True))


def eager(job: Job, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(total, weight) of one eager forward and backward; a scalar loss is its own total."""
    result = job.objective_of(model, batch)
    total, weight = result if isinstance(result, tuple) else (result, torch.ones(()))
    (total / weight).backward()
    return total.detach(), weight.detach()


def assert_close(got: Tensor, wanted: Tensor, relative: float, name: str) -> None:
    """Within `relative` of the largest value: sums in another order differ in the last bits."""
    scale = wanted.abs().max().clamp_min(1e-6)
    difference = (got.double() - wanted.double()).abs().max()
    assert difference <= relative * scale, f"{name}: {difference:.3g} of {scale:.3g}"


@pytest.mark.parametrize("name", EXACT)
def test_the_graph_computes_the_eager_loss_gradients_and_buffers(name: str) -> None:
    case = ZOO[name]
    job = in_double(case)
    model, batch = double(job.build_model().double()), double(case.samples(NUM_SAMPLES, 7))
    graph = captured(name)
    total, weight, results = execute(graph, model, batch)
    eager_total, eager_weight = eager(job, model, batch)
    relative = 1e-5 if case.float32_inside else 1e-9
    assert_close(total / weight, eager_total / eager_weight, relative, "loss")
    for parameter, value in model.named_parameters():
        assert value.grad is not None or parameter in graph.unused
        if value.grad is not None:
            assert_close(results[parameter] / weight, value.grad, relative, parameter)
    for buffer, value in model.named_buffers():
        if buffer in graph.new_buffers:
            assert_close(results[buffer], value, relative, buffer)


def test_batch_norm_buffers_are_outputs_of_the_graph() -> None:
    graph = captured("resnet_bn")
    kinds = {name.rpartition(".")[2] for name in graph.new_buffers}
    assert kinds == {"running_mean", "running_var", "num_batches_tracked"}
    assert len(graph.new_buffers) == len(graph.inputs_of("buffer")) == 60


@pytest.mark.parametrize("name", [name for name in CAPTURABLE if ZOO[name].dropout])
def test_dropout_is_drawn_by_ops_of_ours_and_the_results_are_finite(name: str) -> None:
    case = ZOO[name]
    model, batch = case.job().build_model().double(), double(case.samples(NUM_SAMPLES, 7))
    graph = captured(name)
    drawn = [node for node in graph.ops() if node.target is torch.ops.plait.bernoulli.default]
    assert drawn
    assert not any("dropout" in str(node.target) for node in graph.ops())
    total, weight, results = execute(graph, model, batch)
    assert all(torch.isfinite(value).all() for value in (total, weight, *results.values()))
    assert set(graph.gradients) == {parameter for parameter, _ in model.named_parameters()}


@pytest.mark.parametrize("name", CAPTURABLE)
def test_nothing_is_written_in_place_and_backward_follows_forward(name: str) -> None:
    graph = captured(name)
    ops = list(graph.ops())
    assert not any(getattr(node.target, "_schema", None) and node.target._schema.is_mutable for node in ops)  # type: ignore[union-attr]
    phases = [node.meta["phase"] for node in ops]
    assert phases == sorted(phases, reverse=True)
    assert {"forward", "backward"} == set(phases)
    assert all("val" in node.meta for node in ops)


@pytest.mark.parametrize("name", ["gpt", "hf_llama", "resnet_bn"])
def test_ops_know_their_module_origin_and_line(name: str) -> None:
    case = ZOO[name]
    graph = captured(name)
    modules = {path for path, _ in case.model().named_modules()}
    assert {node.meta["module"] for node in graph.ops()} <= modules
    forward = {node.meta["origin"] for node in graph.ops() if node.meta["phase"] == "forward"}
    for node in graph.ops():
        assert node.meta["origin"]
        if node.meta["phase"] == "backward":
            assert node.meta["origin"] in forward
    inside = [node for node in graph.ops() if "." in node.meta["module"]]
    assert all(re.fullmatch(r".+\.py:\d+", node.meta["source"]) for node in inside)


def test_the_source_is_the_line_of_the_users_file() -> None:
    graph = captured("gpt")
    (node, *_) = (node for node in graph.ops() if node.target is torch.ops.plait.attention.default)
    filename, _, line = node.meta["source"].rpartition(":")
    assert "scaled_dot_product_attention" in Path(filename).read_text().splitlines()[int(line) - 1]


def test_complaint_16_unused_parameters_are_named_without_a_flag() -> None:
    graph = Captures(ZOO["unused_parameter"].job()).of_size(NUM_SAMPLES)
    assert graph.unused == ("forgotten.weight", "forgotten.bias")
    assert set(graph.gradients) == {"used.weight", "used.bias"}


def test_frozen_parameters_have_no_gradient_and_are_not_called_unused() -> None:
    def model() -> nn.Module:
        network = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 10))
        network[0].requires_grad_(False)
        return network

    graph = Captures(ZOO["mlp"].job(model=model)).of_size(NUM_SAMPLES)
    assert graph.unused == ()
    assert set(graph.gradients) == {"1.weight", "1.bias"}


def test_tied_parameters_enter_once() -> None:
    graph = captured("gpt_tied")
    assert graph.aliases == {"head.weight": "tokens.weight"}
    names = [entry.name for entry in graph.inputs_of("parameter")]
    assert "head.weight" not in names
    assert names.count("tokens.weight") == 1


def test_a_model_given_as_an_instance_is_captured_and_left_as_it_was() -> None:
    model = ZOO["gpt_tied"].model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = Captures(ZOO["gpt_tied"].job(model=model), dtype=torch.float64).of_size(NUM_SAMPLES)
    assert graph.aliases == {"head.weight": "tokens.weight"}
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_python_control_flow_on_values_is_refused_with_file_and_line() -> None:
    with pytest.raises(CaptureError, match=r"zoo\.py:\d+ in forward: `for _ in range") as caught:
        Captures(ZOO["branching"].job()).of_size(NUM_SAMPLES)
    assert caught.value.where is not None
    filename, _, line = caught.value.where.rpartition(":")
    assert ".item()" in Path(filename).read_text().splitlines()[int(line) - 1]


class Doubled(torch.autograd.Function):
    """A backward that no reading of the forward would give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 5 * grads[0]


@torch.library.custom_op("plait_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: 5 * grad)


class Hooked(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 10), function

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self.linear(x))
        return result


@pytest.mark.parametrize("function", [doubled, Doubled.apply], ids=["custom op", "autograd function"])
def test_a_backward_written_by_hand_is_captured(function: Any) -> None:
    job = ZOO["mlp"].job(model=lambda: Hooked(function))
    graph = Captures(job, dtype=torch.float64).of_size(NUM_SAMPLES)
    model, batch = job.build_model().double(), double(vectors(NUM_SAMPLES, 7))
    _, weight, results = execute(graph, model, batch)
    eager(job, model, batch)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close(results[name] / weight, parameter.grad, 1e-9, name)


def test_graphs_are_kept_by_shape() -> None:
    captures = Captures(ZOO["mlp"].job())
    assert captures.of_size(5) is captures.of_size(5)
    assert captures.of_size(5) is not captures.of_size(4)
    assert captures.of_size(4).num_samples == 4


def test_no_gradient_flows_through_no_grad() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 10)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = F.relu(self.first(x))
            return self.second(x)

    job = Job(
        model=Half,
        data=[(torch.zeros(16), torch.zeros((), dtype=torch.int64))],
        loss=nn.CrossEntropyLoss(),
        optimizer=OPTIMIZERS["sgd"],
        batch=1,
        steps=1,
    )
    graph = Captures(job).of_size(NUM_SAMPLES)
    assert graph.unused == ("first.weight", "first.bias")
