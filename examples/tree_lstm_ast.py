"""A child-sum tree-LSTM on syntax trees of Python's standard library: what is the expression at the root?

Every sample is a graph of its own: the syntax tree of an expression. Vertices know their type, but for the root's,
which is to be told from what is below it. `plait.Vertices` evaluates all vertices of a batch level by level.

    plait run examples/tree_lstm_ast.py --plan ddp --ranks 2
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait

MODULES = (
    "argparse",
    "ast",
    "inspect",
    "tarfile",
    "zipfile",
    "statistics",
    "textwrap",
    "datetime",
    "fractions",
    "csv",
)
KINDS = (ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.IfExp, ast.Subscript, ast.Tuple, ast.List)
TYPES = sorted(
    name for name, value in vars(ast).items() if isinstance(value, type) and issubclass(value, ast.AST)
)
HIDDEN = len(TYPES)
"""The input of a root: it is not told what it is."""


@cache
def expressions() -> list[tuple[plait.Structure, int]]:
    """Expressions of 4 to 60 vertices, each with the index of its kind."""
    number = {name: index for index, name in enumerate(TYPES)}
    found = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if isinstance(node, KINDS) and 4 <= sum(1 for _ in ast.walk(node)) <= 60:
                found.append((_structure(node, number), KINDS.index(type(node))))
    return found


def _structure(root: ast.AST, number: dict[str, int]) -> plait.Structure:
    vertices, parents = [root], [-1]
    for at, vertex in enumerate(vertices):
        for child in ast.iter_child_nodes(vertex):
            vertices.append(child)
            parents.append(at)
    inputs = [HIDDEN, *(number[type(vertex).__name__] for vertex in vertices[1:])]
    return plait.Structure.of_parents(parents, inputs=inputs)


class Cell(nn.Module):
    """A child-sum tree-LSTM at one vertex (Tai et al., ACL 2015, equations 2 to 8)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.types = nn.Embedding(len(TYPES) + 1, hidden)
        self.gates = nn.Linear(2 * hidden, 3 * hidden)
        self.forget_own, self.forget_seen = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)

    def forward(self, kind: Tensor, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, cells = states
        x = self.types(kind)
        i, o, u = self.gates(torch.cat([x, hidden.sum(0)])).chunk(3, -1)
        forget = torch.sigmoid(self.forget_own(x) + self.forget_seen(hidden))
        cell = torch.sigmoid(i) * torch.tanh(u) + (forget * cells).sum(0)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class TreeModel(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.tree = plait.Vertices(Cell(hidden), state=(hidden, hidden))
        self.out = nn.Linear(hidden, len(KINDS))

    def forward(self, graphs: list[plait.Structure]) -> Tensor:
        hidden, _ = self.tree(graphs).roots
        return self.out(hidden)


class Expressions(torch.utils.data.Dataset[Any]):
    """Every fifth expression is held out."""

    def __init__(self, *, held_out: bool) -> None:
        self._samples = [s for index, s in enumerate(expressions()) if (index % 5 == 0) == held_out]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[plait.Structure, int]:
        return self._samples[index]


def accuracy(scores: Tensor, kinds: Tensor) -> Tensor:
    return (scores.argmax(1) == kinds).float().mean()


def job() -> plait.Job:
    torch.manual_seed(0)
    return plait.Job(
        model=TreeModel(),
        data=Expressions(held_out=False),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        batch=64,
        epochs=1,
        evaluate=Expressions(held_out=True),
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), "ddp", 2)
    print(f"held-out accuracy: {result.evaluation['accuracy']:.3f}")
