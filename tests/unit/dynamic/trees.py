"""Trees and functions of their vertices for tests."""

import random
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 20


def tree(rng: random.Random, leaves: int) -> Any:
    """A random binary tree of nested tuples with words at its leaves."""
    if leaves == 1:
        return rng.randrange(WORDS)
    left = rng.randrange(1, leaves)
    return (tree(rng, left), tree(rng, leaves - left))


def trees(seed: int, *sizes: int) -> list[Any]:
    rng = random.Random(seed)
    return [tree(rng, size) for size in sizes]


class BinaryCell(nn.Module):
    """A binary tree-LSTM's function of one vertex (Tai et al., ACL 2015)."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.inner = nn.Linear(2 * hidden, 5 * hidden)

    def forward(self, word: Tensor | None, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, cells = states
        if word is not None:
            i, o, u = self.leaf(self.words(word)).chunk(3, -1)
            cell = torch.sigmoid(i) * torch.tanh(u)
        else:
            i, o, u, f, g = self.inner(hidden.reshape(-1)).chunk(5, -1)
            cell = (
                torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * cells[0] + torch.sigmoid(g) * cells[1]
            )
        return torch.sigmoid(o) * torch.tanh(cell), cell


class ChildSum(nn.Module):
    """Any number of children: their mean goes through a layer."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.own = nn.Linear(2, hidden)
        self.seen = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor | None, states: Tensor) -> Tensor:
        total = torch.tanh(self.seen(states)).sum(0)
        return torch.tanh(total + self.own(x)) if x is not None else torch.tanh(total)


class Recursive(nn.Module):
    """A tree-LSTM as people write it: for one tree, by calling itself."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.inner = nn.Linear(2 * hidden, 5 * hidden)
        self.out = nn.Linear(hidden, 3)

    def node(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(self.words(torch.tensor(tree))).chunk(3, -1)
            cell = torch.sigmoid(i) * torch.tanh(u)
        else:
            (left, left_cell), (right, right_cell) = map(self.node, tree)
            i, o, u, f, g = self.inner(torch.cat([left, right])).chunk(5, -1)
            cell = torch.sigmoid(i) * torch.tanh(u)
            cell += torch.sigmoid(f) * left_cell + torch.sigmoid(g) * right_cell
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree)[0])
