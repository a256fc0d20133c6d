"""A binary tree-LSTM on syntax trees of Python's standard library: which operator joins the two sides?

The model is plain recursive PyTorch for one tree. `plait.Batched` runs it for a batch: what the code does for each tree
is written down, and operations that are alike run together.

    plait run examples/binary_tree_ast.py --plan ddp --ranks 2

Of the held-out expressions the model names the operator of 0.52; always saying the commonest gives 0.28.
"""

import ast
import importlib.util
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait

MODULES = (
    *("argparse", "ast", "inspect", "tarfile", "zipfile", "statistics", "textwrap", "datetime", "fractions"),
    *("csv", "random", "calendar", "turtle", "difflib", "pickletools", "_pydecimal", "ipaddress", "colorsys"),
)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.Div, ast.FloorDiv, ast.BitOr, ast.BitAnd)
TYPES = sorted(
    name for name, value in vars(ast).items() if isinstance(value, type) and issubclass(value, ast.AST)
)
CONSTANTS = ("str", "bytes", "int", "float", "bool", "NoneType", "ellipsis", "complex")
"""Constants are told apart by their type."""
NAMES = 200
"""Names are told apart as far as they are hashed to different numbers."""
Sample = tuple[Any, int]


@cache
def expressions() -> list[Sample]:
    """Both sides of expressions with an operator, as nested pairs, with the operator's index."""
    found = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, OPERATORS):
                continue
            if sum(1 for _ in ast.walk(node)) <= 40:
                found.append(((pairs(node.left), pairs(node.right)), OPERATORS.index(type(node.op))))
    return found


def pairs(node: ast.AST) -> Any:
    """A syntax tree of any number of children as pairs: a vertex, then its children one after the other."""
    made: Any = TYPES.index(type(node).__name__)
    if isinstance(node, ast.Constant):
        made = len(TYPES) + CONSTANTS.index(type(node.value).__name__)
    elif isinstance(node, ast.Name):
        made = len(TYPES) + len(CONSTANTS) + zlib.crc32(node.id.encode()) % NAMES
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr_context):
            made = (made, pairs(child))
    return made


class BinaryTreeLSTM(nn.Module):
    """For one tree (Tai et al., ACL 2015, equations 9 to 14)."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.types = nn.Embedding(len(TYPES) + len(CONSTANTS) + NAMES, hidden)
        self.leaf, self.inner = nn.Linear(hidden, 3 * hidden), nn.Linear(2 * hidden, 5 * hidden)
        self.out = nn.Linear(hidden, len(OPERATORS))

    def node(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(self.types(torch.tensor(tree, device=self.out.weight.device))).chunk(3)
            cell = torch.sigmoid(i) * torch.tanh(u)
        else:
            (left, left_cell), (right, right_cell) = self.node(tree[0]), self.node(tree[1])
            i, o, u, f, g = self.inner(torch.cat([left, right])).chunk(5)
            cell = torch.sigmoid(i) * torch.tanh(u)
            cell = cell + torch.sigmoid(f) * left_cell + torch.sigmoid(g) * right_cell
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree)[0])


def expressions_of(*, held_out: bool) -> list[Sample]:
    """Every fifth expression is held out."""
    return [sample for index, sample in enumerate(expressions()) if (index % 5 == 0) == held_out]


def together(samples: list[Sample]) -> tuple[list[Any], Tensor]:
    """Trees stay what they are; torch's own way would take nested tuples apart."""
    return [tree for tree, _ in samples], torch.tensor([operator for _, operator in samples])


def leaves(tree: Any) -> int:
    return 1 if isinstance(tree, int) else leaves(tree[0]) + leaves(tree[1])


def accuracy(scores: Tensor, operators: Tensor) -> Tensor:
    return (scores.argmax(1) == operators).float().mean()


def job() -> plait.Job:
    torch.manual_seed(0)
    data = expressions_of(held_out=False)
    return plait.Job(
        model=plait.Batched(BinaryTreeLSTM()),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        batch=64,
        epochs=5,
        collate=together,
        work=[leaves(tree) for tree, _ in data],
        evaluate=expressions_of(held_out=True),
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), "ddp", 2)
    print(f"held-out accuracy: {result.evaluation['accuracy']:.3f}")
