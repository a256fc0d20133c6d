"""Gradients of matrix products are written straight into the caller's memory, where nobody else sees them."""

import torch
from torch import Tensor, fx

from plait.program.program import Segment
from plait.program.segment.codegen import make_segment

CPU = torch.device("cpu")
aten = torch.ops.aten


def _segment(build: object) -> tuple[Segment, list[str]]:
    """A segment over inputs a [3, 4] and b [3, 5]; `build(graph, a, b)` returns the nodes that go out."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta["val"], b.meta["val"] = torch.empty(3, 4), torch.empty(3, 5)
    outputs = [node.name for node in build(graph, a, b)]  # type: ignore[operator]
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node in nodes:
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
        node.meta["val"] = node.target(*values)
    return make_segment("s", "backward", nodes, ["a", "b"], outputs, CPU), outputs


def _inputs() -> list[Tensor]:
    return [torch.randn(3, 4), torch.randn(3, 5)]


def _product(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    return graph.call_function(aten.mm.default, (graph.call_function(aten.t.default, (a,)), b))


def test_a_product_behind_two_transposes_lands_in_the_given_memory() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        once = graph.call_function(aten.t.default, (_product(graph, a, b),))
        return [graph.call_function(aten.t.default, (once,))]

    segment, _ = _segment(build)
    assert segment.fillable == (0,)
    given, memory = _inputs(), torch.full((4, 5), torch.nan)
    expected = given[0].t() @ given[1]
    (result,) = segment.run(list(given), [memory])
    assert result.data_ptr() == memory.data_ptr()
    assert torch.equal(memory, expected)
    assert torch.equal(segment.run(list(given))[0], expected)
    assert torch.equal(segment.run(list(given), [None])[0], expected)


def test_an_odd_number_of_transposes_and_a_view_are_undone() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        turned = graph.call_function(aten.t.default, (_product(graph, a, b),))
        return [turned, graph.call_function(aten.view.default, (_product(graph, a, b), [2, 10]))]

    segment, _ = _segment(build)
    assert sorted(segment.fillable) == [0, 1]
    given = _inputs()
    memory = {0: torch.full((5, 4), torch.nan), 1: torch.full((2, 10), torch.nan)}
    results = segment.run(list(given), [memory[position] for position in segment.fillable])
    expected = given[0].t() @ given[1]
    torch.testing.assert_close(memory[0], expected.t())
    torch.testing.assert_close(memory[1], expected.view(2, 10))
    assert all(results[position].data_ptr() == memory[position].data_ptr() for position in memory)


def test_a_product_that_is_read_elsewhere_keeps_its_own_memory() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        product = _product(graph, a, b)
        return [
            graph.call_function(aten.t.default, (product,)),
            graph.call_function(aten.neg.default, (product,)),
        ]

    assert _segment(build)[0].fillable == ()


def test_an_output_that_the_graph_reads_again_keeps_its_own_memory() -> None:
    def build(graph: fx.Graph, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        product = _product(graph, a, b)
        return [product, graph.call_function(aten.neg.default, (product,))]

    assert _segment(build)[0].fillable == ()
