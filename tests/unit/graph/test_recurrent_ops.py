"""Layers of GRU, LSTM and plain recurrent cells: one op a layer and direction, equal to torch's functions."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from plait.graph.from_job import Captures
from plait.graph.ops.lstm import stacked_lstm
from plait.graph.ops.rnn import KINDS, rnn_layer, stacked_rnn
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
    "lstm": nn.LSTM,
}
FUNCTIONS: dict[str, Any] = {
    "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu, "lstm": torch.lstm,
}  # fmt: skip
WIDTH = 4


class Words(nn.Module):
    def __init__(self, layer: Callable[..., nn.RNNBase], learned: bool = False, **options: Any) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(11, WIDTH), layer(WIDTH, 6, batch_first=True, **options)
        directions = 2 if self.layer.bidirectional else 1
        self.head = nn.Linear(6 * directions, 4)
        shape = (self.layer.num_layers * directions, 1, 6)
        self.first = nn.Parameter(torch.randn(shape)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.expand(-1, len(x), -1).contiguous() if self.first is not None else None
        out, last = self.layer(self.words(x), first)
        last = last[0] if isinstance(last, tuple) else last
        result: Tensor = self.head(out).mean(1) + last.sum((0, 2))[:, None]
        return result


def job(model: Callable[[], nn.Module], **fields: Any) -> Job:
    generator = torch.Generator().manual_seed(1)
    data = (torch.randint(0, 11, (14, 6), generator=generator), torch.arange(14) % 4)
    given = {
        "loss": None if "objective" in fields else nn.CrossEntropyLoss(), "batch": 7, "accumulate": 2, "steps": 2,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), **fields,
    }  # fmt: skip
    return Job(model=model, data=data, **given)


def ops_of(given: Job, device_type: str = "cpu") -> Counter[str]:
    nodes = Captures(given, device_type=device_type).of_size(3).graph.nodes
    return Counter(str(node.target).removeprefix("plait.") for node in nodes if "_layer" in str(node.target))


def same(job: Job, plan: str, ranks: int, captures: Captures) -> None:
    one = run_eager(job, 2, torch.float64, captures)
    other = run_serially(job, resolve(plan, ranks), 2, torch.float64, captures=captures)
    assert other.losses == pytest.approx(one.losses, rel=1e-12)
    for mine, theirs in zip(other.gradients, one.gradients, strict=True):
        for name, gradient in theirs.items():
            assert torch.allclose(mine[name], gradient, rtol=1e-9, atol=1e-12), name
    for name, weight in one.weights.items():
        assert torch.allclose(other.weights[name], weight, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", list(LAYERS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False, "batch_first": True}]
)
def test_outputs_and_gradients_are_torchs(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name](WIDTH, 5, **options).to(dtype)
    num_states = layer.num_layers * (2 if layer.bidirectional else 1)
    x = torch.randn(6, 6, WIDTH, dtype=dtype, requires_grad=True)
    states = [torch.randn(num_states, 6, 5, dtype=dtype, requires_grad=True) for _ in range(2)]
    state: Any = states if name == "lstm" else states[0]
    weights = list(layer.parameters())
    inputs = [x, *(states if name == "lstm" else states[:1]), *weights]
    how = (layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, layer.batch_first)
    function = FUNCTIONS[name]
    ours = partial(stacked_lstm) if name == "lstm" else partial(stacked_rnn, KINDS[function])
    expected, found = function(x, state, weights, *how), ours(x, state, weights, *how)
    weighing = [torch.randn(tensor.shape, dtype=dtype) for tensor in expected]
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for theirs, mine in zip(expected, found, strict=True):
        assert torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    theirs = torch.autograd.grad(expected, inputs, weighing)
    for one, other in zip(theirs, torch.autograd.grad(found, inputs, weighing), strict=True):
        assert torch.allclose(other, one, rtol=tolerance, atol=tolerance)


def test_a_share_without_samples_gives_no_gradient_to_weights() -> None:
    weights = [torch.randn(shape, requires_grad=True) for shape in ((15, 4), (15, 5), (15,), (15,))]
    x, h = torch.randn(3, 0, 4, requires_grad=True), torch.randn(0, 5, requires_grad=True)
    y, last, *_ = rnn_layer(x, *weights, h, KINDS[torch.gru], False)
    assert y.shape == (3, 0, 5) and last.shape == (0, 5)
    for tensor, gradient in zip(weights, torch.autograd.grad([y.sum() + last.sum()], weights), strict=True):
        assert gradient.shape == tensor.shape and not gradient.any()


@pytest.mark.parametrize(
    ("plan", "ranks"), [("single", 1), ("ddp", 2), ("zero3", 2), ("1f1b", 2), ("tensor", 2), ("domain", 2)]
)
@pytest.mark.parametrize("name", ["gru", "tanh", "relu"])
def test_plans_equal_eager(name: str, plan: str, ranks: int) -> None:
    layer, relu = LAYERS[name], name == "relu"
    options = {"bias": False} if relu else {"bidirectional": True, "num_layers": 2, "learned": True}
    given = job(lambda: Words(layer, **options))
    captures = Captures(given, None, torch.float64)
    num_layers = 1 if relu else 4
    assert ops_of(given) == {"rnn_layer.default": num_layers, "rnn_layer_backward.default": num_layers}
    same(given, plan, ranks, captures)


def test_an_evaluated_layer_is_one_op_too_and_drops_nothing() -> None:
    class Frozen(Words):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self.layer.eval()
            return self

    given = job(lambda: Frozen(nn.GRU, num_layers=2, dropout=0.5))
    assert ops_of(given)["rnn_layer.default"] == 2
    same(given, "ddp", 2, Captures(given, None, torch.float64))


def test_dropout_lies_between_layers() -> None:
    given = job(lambda: Words(nn.GRU, num_layers=3, dropout=0.5))
    nodes = Captures(given).of_size(3).graph.nodes
    assert sum(str(node.target) == "plait.bernoulli.default" for node in nodes) == 2
    same(given, "zero3", 2, Captures(given, None, torch.float64))


def penalty(model: Any, batch: Any) -> Tensor:
    inputs = model.words(batch[0]).detach().requires_grad_()
    out = model.head(model.layer(inputs)[0]).sum()
    (gradient,) = torch.autograd.grad(out, inputs, create_graph=True)
    found: Tensor = (
        nn.functional.cross_entropy(model(batch[0]), batch[1]) + gradient.square().sum((1, 2)).mean()
    )
    return found


def test_gradients_of_gradients_go_through_plain_ops() -> None:
    given = job(lambda: Words(nn.RNN), objective=penalty)
    assert not ops_of(given)
    same(given, "single", 1, Captures(given, None, torch.float64))


class Packed(Words):
    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 3).sum(1).clamp(min=1)
        packed = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        out: Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0].sum(1)
        return self.head(out)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_packed_sequences_are_as_eager(name: str) -> None:
    given = job(lambda: Packed(LAYERS[name]), accumulate=1)
    same(given, "ddp", 2, Captures(given, None, torch.float64))


@pytest.mark.parametrize("name", ["gru", "tanh", "lstm"])
def test_autocast_computes_layers_in_its_dtype(name: str) -> None:
    """As eager torch: on processors a GRU alone keeps its state in float32, and is captured so."""
    given = job(lambda: Words(LAYERS[name]), precision="bf16")
    for device_type in ("cpu", "cuda"):
        captures = Captures(given, device_type=device_type)
        graph = captures.of_size(3).graph
        layers = [node for node in graph.nodes if str(node.target).endswith("_layer.default")]
        assert len(layers) == (0 if (name, device_type) == ("gru", "cpu") else 1)
        assert {node.meta["val"][0].dtype for node in layers} <= {torch.bfloat16}
        one = run_eager(given, 2, torch.float32, captures)
        other = run_serially(given, resolve("single", 1), 2, torch.float32, captures=captures)
        assert other.losses == pytest.approx(
            one.losses, rel=2e-3
        )  # bf16 has 8 bits; sums are ordered otherwise
