"""Vertex functions: batches of graphs equal one vertex after the other, and bad graphs are told."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import networkx  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from tests.unit.dynamic.trees import BinaryCell, ChildSum, trees
from torch import Tensor, nn

from plait import Structure, Vertices
from plait.dynamic import vertices
from plait.errors import DataError, JobError


def both(model: Vertices, read: Callable[[Vertices], Tensor]) -> float:
    """The greatest difference between batched and one by one, of the loss and all gradients."""
    found = []
    for batched in (True, False):
        model.batched = batched
        model.zero_grad()
        loss = read(model)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) and found[0][0].abs() > 1e-6
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def squares(states: Any) -> Tensor:
    return sum((part**2).sum() for part in (states if isinstance(states, tuple) else (states,)))


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1, 3), (5, 9, 1, 16)])
def test_a_batch_of_trees_equals_one_vertex_after_the_other(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Vertices(BinaryCell().double(), state=(6, 6))
    batch = trees(1, *sizes)
    assert both(model, lambda m: squares(m(batch).roots)) < 1e-12
    assert both(model, lambda m: squares(m(batch).all) + m(batch).of(len(sizes) - 1)[0].sum()) < 1e-11
    assert model.last is not None and model.last.num_vertices == sum(2 * size - 1 for size in sizes)


def test_levels_are_one_call_each() -> None:
    model = Vertices(BinaryCell(), state=(6, 6))
    model([((0, 1), (2, 3)), ((4, 5), (6, 7)), (1, 2)])
    assert model.last is not None and model.last.level_sizes == (10, 5, 2)
    assert model.last.group_sizes == (8, 5, 2), "leaves with one word have one state"


def test_leaves_that_draw_random_numbers_each_draw_their_own() -> None:
    class Noisy(BinaryCell):
        def forward(self, word: Tensor | None, states: Any) -> Any:
            hidden, cell = super().forward(word, states)
            return torch.nn.functional.dropout(hidden, 0.5, self.training), cell

    model = Vertices(Noisy(), state=(6, 6))
    hidden, _ = model([(1, 1)] * 8).all
    assert len({tuple(row) for row in hidden[[i for i in range(24) if i % 3]].tolist()}) > 8
    model.eval()
    hidden, _ = model([(1, 1)] * 8).all
    assert len({tuple(row) for row in hidden.tolist()}) == 2 and model.last.group_sizes == (1, 8)  # type: ignore[union-attr]


def test_any_number_of_children_is_traced_a_few_times() -> None:
    torch.manual_seed(0)
    model = Vertices(ChildSum().double(), state=5)
    rng = torch.Generator().manual_seed(0)
    graphs = []
    for count in (1, 4, 9, 14):
        parents = [-1] + [int(torch.randint(0, v, (), generator=rng)) for v in range(1, count)]
        inputs = [torch.randn(2, dtype=torch.float64, generator=rng) if v % 3 else None for v in range(count)]
        graphs.append(Structure.of_parents(parents, inputs=inputs))
    assert both(model, lambda m: squares(m(graphs).all)) < 1e-12
    assert len({len(g.children) for g in graphs}) > 2
    # 0, 1 and several others, each with and without an input of its own; torch 2.11 traces every number
    numbers = {int(count) for graph in graphs for count in np.diff(graph.first)}
    several = 3 if torch.__version__ >= "2.12" else len(numbers)
    assert len(numbers) > 3 and sum(map(len, model._functions.values())) <= 2 * several


def test_vertices_of_too_many_forms_are_told_and_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertices, "_MOST_FUNCTIONS", 2)
    model = Vertices(ChildSum().double(), state=5)
    inputs = [None, torch.ones(2, dtype=torch.float64), None, torch.ones(2, dtype=torch.float64)]
    with pytest.warns(UserWarning, match="traced again"):
        assert (
            both(model, lambda m: squares(m([Structure.of_parents([-1, 0, 0, 1], inputs=inputs)]).all))
            < 1e-12
        )
    assert sum(map(len, model._functions.values())) <= 2


def test_graphs_that_are_no_trees_and_gradients_of_inputs() -> None:
    torch.manual_seed(0)
    model = Vertices(ChildSum().double(), state=5)
    diamond = Structure.of_edges(4, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)], inputs=[0, 0, 0, 0])
    rows = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    grads = []
    for batched in (True, False):
        model.batched = batched
        (grad,) = torch.autograd.grad(squares(model([diamond, diamond], inputs=rows).roots), rows)
        grads.append(grad)
    assert torch.allclose(grads[0], grads[1], rtol=1e-12, atol=1e-14) and grads[0].abs().min() > 0


def test_kinds_of_vertices_and_objects() -> None:
    torch.manual_seed(0)

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, value: Tensor | None, states: Tensor) -> Tensor:
            return torch.tanh(self.layer(states.sum(0)))

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, value: Tensor, states: Tensor) -> Tensor:
            return self.scale * value

    def number(value: float) -> Any:
        return SimpleNamespace(kind="number", input=torch.tensor(value, dtype=torch.float64), children=[])

    def total(*children: Any) -> Any:
        return SimpleNamespace(kind="sum", input=None, children=list(children))

    model = Vertices({"sum": Sum(), "number": Number()}, state=4)
    shared = number(3.0)
    batch = [total(number(1.0), total(shared, shared)), total(number(2.0)), number(5.0)]
    assert both(model, lambda m: squares(m(batch).roots)) < 1e-13
    assert model(batch).sizes == (4, 2, 1), "an object that two see is one vertex"
    with pytest.raises(
        DataError, match=r"sample 0 of the batch: vertex 0 is of kind 'other'; .*'sum', 'number'"
    ):
        model([SimpleNamespace(kind="other", children=[])])


def test_graphs_of_libraries() -> None:
    torch.manual_seed(0)
    model = Vertices(ChildSum(), state=5)
    drawn = networkx.DiGraph([("a", "c"), ("b", "c")])
    for node in drawn.nodes:
        drawn.nodes[node]["input"] = torch.ones(2)
    like_geometric = SimpleNamespace(
        edge_index=torch.tensor([[0, 1], [2, 2]]), x=torch.ones(3, 2), num_nodes=3
    )
    first, second = (model([graph]).roots for graph in (drawn, like_geometric))
    assert first.shape == (1, 5) and torch.equal(first, second)
    with pytest.raises(DataError, match="sample 1 of the batch: its edges have no direction"):
        model([drawn, drawn.to_undirected()])


def test_layers_and_cells_of_torch_are_batched(recwarn: pytest.WarningsRecorder) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.seen = nn.Embedding(9, 5), nn.Linear(5, 5)
            self.long, self.gated, self.plain = (
                nn.LSTMCell(5, 5),
                nn.GRUCell(5, 5),
                nn.RNNCell(5, 5, nonlinearity="relu"),
            )
            self.norm = nn.LayerNorm(5)

        def forward(self, word: Tensor, states: tuple[Tensor, Tensor]) -> Any:
            x = self.words(word)
            hidden, kept = states[0].sum(0), states[1].sum(0)
            if len(states[0]):
                hidden = self.norm(self.seen(states[0]).sum(0))  # a product whose rows are children
            hidden, kept = self.long(self.plain(self.gated(x), hidden), (hidden, kept))
            return hidden, kept

    torch.manual_seed(0)
    model = Vertices(Cells().double(), state=(5, 5))
    graphs = [
        Structure.of_parents([-1, 0, 0, 1], inputs=[1, 2, 3, 4]),
        Structure.of_parents([-1], inputs=[2]),
    ]
    assert both(model, lambda m: squares(m(graphs).roots)) < 1e-12
    assert not [warned for warned in recwarn.list if "one by one" in str(warned.message)]


def test_rounds_of_messages_on_a_graph_with_circles() -> None:
    torch.manual_seed(0)

    class Start(nn.Module):
        def forward(self, x: Tensor, states: Tensor) -> Tensor:
            return x

    class Round(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.other = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

        def forward(self, x: None, states: Tensor) -> Tensor:
            return torch.tanh(self.own(states[0]) + self.other(states[1:]).sum(0))

    edges = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 3, 2, 2]])
    x = torch.randn(4, 3, dtype=torch.float64)
    model = Vertices({"start": Start(), "round": Round()}, state=3)
    states = model([Structure.of_rounds(4, edges, 2, inputs=x)]).all
    layer = model.cell[1]  # type: ignore[index]
    expected = x
    for _ in range(2):
        messages = torch.zeros_like(expected).index_add(0, edges[1], layer.other(expected)[edges[0]])
        expected = torch.tanh(layer.own(expected) + messages)
    assert torch.allclose(states[-4:], expected, rtol=1e-12, atol=1e-14)


def test_a_chain_of_ten_thousand_and_a_star_of_a_hundred_thousand() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor, states: Tensor) -> Tensor:
            return x + states.sum(0)

    chain: Any = 1.0
    for _ in range(10_000):
        chain = [chain]
    model = Vertices(Add(), state=1, input=lambda _: torch.ones(1))
    assert float(model([chain]).roots) == 10_001
    star = Structure.of_edges(100_001, torch.stack([torch.arange(100_000), torch.full((100_000,), 100_000)]),
                              inputs=torch.ones(100_001, 1))  # fmt: skip
    assert float(model([star]).roots) == 100_001


def test_what_cannot_be_batched_runs_one_by_one_and_is_named() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, states: Tensor) -> Tensor:
            made = self.layer(x) + states.sum(0)
            return made if made.sum() > 0 else -made

    model = Vertices(Branch(), state=2)
    graph = Structure.of_parents([-1, 0], inputs=torch.randn(2, 2))
    with pytest.warns(UserWarning, match="cannot be batched and runs one by one"):
        made = model([graph]).roots
    model.batched = False
    assert torch.equal(made, model([graph]).roots)


def test_copies_keep_no_traces() -> None:
    model = Vertices(BinaryCell(), state=(6, 6))
    batch = trees(0, 4)
    expected = model(batch).roots[0]
    other = copy.deepcopy(model)
    assert not other._functions and torch.equal(other(batch).roots[0], expected)
    with torch.no_grad():
        assert torch.equal(model(batch).roots[0], expected)
    assert set(model.state_dict()) == {f"cell.{name}" for name in model.cell.state_dict()}


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Structure.of_edges(3, [(0, 1), (1, 2), (2, 1)]), "vertex 1 sees itself"),
        (
            lambda: Structure.of_edges(2, [(0, 5)]),
            r"edge 0, \(0, 5\), names a vertex that is not there; there are 2",
        ),
        (lambda: Structure.of_edges(0, []), "no vertex"),
        (lambda: Structure.of_edges(2, [(0, 1)], inputs=[1]), "1 inputs for 2 vertices"),
        (lambda: Structure.of_edges(2, torch.zeros(3, 3)), "edges have the shape"),
        (
            lambda: Structure.of_parents([-1, 0], inputs=[torch.zeros(2), torch.zeros(3)]),
            "the input of vertex 1 is",
        ),
        (lambda: Structure.of_parents([-1, 0], inputs=["a", object()]), "cannot be one tensor"),
        (lambda: Structure.of_parents([-1, 0], inputs=[1, "a"]), "'a' of vertex 1"),
        (lambda: Structure.of_parents([-1, -5]), r"edge 0, \(1, -5\), names a vertex that is not there"),
        (lambda: Structure.of_edges(2, torch.tensor([[0.0, 1.5]])), "type float32"),
        (lambda: Structure.of_edges(2, [(0, 1)], kinds=["a"]), "1 kinds for 2 vertices"),
        (lambda: Structure.of_rounds(2, [(3, 0)], 3, inputs=[1, 2]), r"edge 0, \(3, 0\)"),
        (lambda: Structure.of_rounds(2, [(1, 0)], 3, inputs=[1]), "1 inputs for 2 vertices"),
    ],
)
def test_bad_graphs_are_told(made: Callable[[], Structure], told: str) -> None:
    with pytest.raises(DataError, match=told):
        made()


def test_bad_batches_and_functions_are_told() -> None:
    model = Vertices(BinaryCell(), state=(6, 6))
    with pytest.raises(DataError, match="no graph in the batch"):
        model([])
    with pytest.raises(DataError, match="inputs= has 1 rows; 2 vertices"):
        model([(1, 2)], inputs=torch.zeros(1, dtype=torch.long))
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(DataError, match="sample 1 of the batch: vertex 0 sees itself"):
        model([(1, 2), circle])
    with pytest.raises(DataError, match="sample 1 of the batch: vertex 0 sees None, after 1 others"):
        model([(1, 2), (1, None)])
    with pytest.raises(DataError, match="sample 1 of the batch: it is None"):
        model([(1, 2), None])
    with pytest.raises(IndexError) as raised:
        model([(1, 2), (1, (2, 9999))])
    assert raised.value.__notes__ == ["At sample 1 of the batch, vertex 4."]
    with pytest.raises(
        JobError,
        match=r"sample 0 of the batch, vertex 0: .* gives \(6,\) and \(6,\); its state is \(5,\) and \(5,\)",
    ):
        Vertices(BinaryCell(), state=(5, 5))([1])
