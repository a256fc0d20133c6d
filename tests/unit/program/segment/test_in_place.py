"""Pointwise ops over operands that die: the same numbers, and never memory that somebody else still sees."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from plait.program.local.communicate import take_shard
from plait.program.program import Segment
from plait.program.segment.codegen import make_segment
from plait.torch_private.fake import FakeTensorMode

aten = torch.ops.aten


def segment_of(function: Callable[..., object], *given: Tensor) -> Segment:
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs = [node.name for node in output.all_input_nodes]
    return make_segment("s", "forward", nodes, inputs, outputs, torch.device("cpu"))


def chain(x: Tensor, y: Tensor) -> Tensor:
    made = x @ y
    made = aten.gelu(made * 0.5 + x)
    return aten.tanh_backward(made - y, aten.tanh(x))


def test_what_dies_is_written_over() -> None:
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    segment = segment_of(chain, x, y)
    assert len(segment.over) == 5  # mul, add, gelu, sub and the gradient of tanh
    before = x.clone(), y.clone()
    (found,) = segment.run([x, y])
    assert torch.equal(found, chain(x, y))
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x * y,  # an input
        lambda x, y: ((made := x @ y), made * 2),  # an output
        lambda x, y: ((made := x @ y).t(), made + 1),  # a view of it is one
        lambda x, y: (made := x @ y).view(-1)[:8] + (made * 2).sum(),  # a view is read later
        lambda x, y: x.t() + y,  # an input, seen through a view
        lambda x, y: (x @ y) * torch.ones(3, 1, 1, dtype=x.dtype),  # a larger result
        lambda x, y: (x @ y).float().to(x.dtype) == y,  # another dtype
    ],
    ids=["input", "output", "viewed", "read later", "input viewed", "larger", "dtype"],
)
def test_what_others_see_is_not(function: Callable[..., object]) -> None:
    x, y = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    segment = segment_of(function, x, y)
    wanted = function(x, y)
    found = segment.run([x.clone(), y.clone()])
    for one, other in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert isinstance(other, Tensor) and torch.equal(one, other)
    assert not segment.over


def test_the_same_operand_twice() -> None:
    x = torch.randn(8, 8)
    segment = segment_of(lambda x: (made := x @ x) * made, x)
    assert not segment.over
    assert torch.equal(segment.run([x.clone()])[0], (x @ x) * (x @ x))


@pytest.mark.parametrize("dim", [0, 1], ids=["a view", "a copy"])
def test_what_a_function_of_ours_may_show_is_not(dim: int) -> None:
    """A shard that is taken of a tensor along its first dim lies in that tensor's memory."""
    graph, mode = fx.Graph(), FakeTensorMode()
    values = {"x": (8, 8), "made": (8, 8), "shard": (4, 8) if dim == 0 else (8, 4), "larger": (8, 8)}
    x = graph.placeholder("x")
    made = graph.call_function(aten.mm.default, (x, x))
    shard = graph.call_function(take_shard, (made, dim, 4, 1, 1))
    larger = graph.call_function(aten.mul.Scalar, (made, 2.0))
    graph.output((shard, larger))
    with mode:
        for node, shape in zip((x, made, shard, larger), values.values(), strict=True):
            node.meta["val"] = torch.empty(shape, dtype=torch.float64)
    nodes = [made, shard, larger]
    segment = make_segment("s", "forward", nodes, ["x"], [shard.name, larger.name], torch.device("cpu"))
    given = torch.randn(8, 8, dtype=torch.float64)
    taken, doubled = segment.run([given])
    assert torch.equal(doubled, (given @ given) * 2)
    assert torch.equal(taken, (given @ given).narrow(dim, 1, 4))
