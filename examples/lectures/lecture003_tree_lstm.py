"""A tree-LSTM one by one and batched, lecture 003: graphs that differ by sample, on syntax trees.

python -m examples.lectures.lecture003_tree_lstm
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import bars
from torch import Tensor, nn

import plait

WORDS, HIDDEN, TREES = 200, 64, 64


def tree(rng: random.Random, leaves: int) -> Any:
    """Nested pairs; a leaf is the number of a word."""
    if leaves == 1:
        return rng.randrange(WORDS)
    left = rng.randrange(1, leaves)
    return (tree(rng, left), tree(rng, leaves - left))


class TreeLSTM(nn.Module):
    """For one tree, as people write it: Python's own recursion."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.leaf, self.inner = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(2 * HIDDEN, 5 * HIDDEN)

    def node(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(self.words(torch.tensor(tree))).chunk(3, -1)
            cell = torch.sigmoid(i) * torch.tanh(u)
            return torch.sigmoid(o) * torch.tanh(cell), cell
        (left, left_cell), (right, right_cell) = self.node(tree[0]), self.node(tree[1])
        i, o, u, f, g = self.inner(torch.cat([left, right])).chunk(5, -1)
        cell = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f) * left_cell + torch.sigmoid(g) * right_cell
        return torch.sigmoid(o) * torch.tanh(cell), cell

    def forward(self, tree: Any) -> Tensor:
        return self.node(tree)[0]


def timed(run: Callable[[], Tensor], model: nn.Module) -> tuple[float, list[Tensor]]:
    """Seconds of forward and backward, the median of five, and the gradients."""
    seconds = []
    for _ in range(5):
        model.zero_grad()
        began = time.perf_counter()
        run().backward()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), [w.grad.clone() for w in model.parameters() if w.grad is not None]


def both(trees: Sequence[Any]) -> tuple[float, float, float]:
    """Seconds one by one, seconds batched, the largest difference of a gradient."""
    torch.manual_seed(0)
    model = TreeLSTM().double()
    batched = plait.Batched(model)
    alone_s, alone = timed(lambda: sum((model(tree).sum() for tree in trees), start=torch.zeros(())), model)
    together_s, together = timed(lambda: batched(list(trees)).sum(), model)
    apart = max((a - b).abs().max().item() for a, b in zip(alone, together, strict=True))
    return alone_s, together_s, apart


def exhibit() -> Exhibit:
    rng = random.Random(0)
    trees = [tree(rng, rng.randrange(10, 31)) for _ in range(TREES)]
    alone_s, together_s, apart = both(trees)
    return Exhibit(
        lecture="003",
        title="A tree-LSTM, one by one and batched",
        idea="A static graph is defined once and batched by nature. A tree-LSTM has another graph for "
        "each sentence: no natural batching, says the lecture. `plait.Batched` records what the "
        "unmodified recursive code does for each tree, and runs equal operations of all trees together; "
        "`plait.Vertices` does the same for a function of one vertex.",
        numbers=[
            Number(what="speed of the batch to one by one", ours=alone_s / together_s),
            Number(what="largest difference of a gradient", ours=f"{apart:.1e}"),
        ],
        tables=[
            Table(
                title=f"{TREES} trees of 10 to 30 leaves, hidden {HIDDEN}, forward and backward",
                columns=["how", "time"],
                rows=[["one by one", f"{1e3 * alone_s:.0f} ms"], ["batched", f"{1e3 * together_s:.0f} ms"]],
            )
        ],
        pictures={
            "Forward and backward of 64 trees": bars(
                "time", {"one by one": {"ms": 1e3 * alone_s}, "batched": {"ms": 1e3 * together_s}}, unit="ms"
            )
        },
        seen="The code of the model was not touched. `bench/dynamic.py` compares both ways with DyNet "
        "and with a program batched by hand; `examples/tree_lstm_ast.py` trains a tree-LSTM on the "
        "syntax trees of Python's own library.",
    )


if __name__ == "__main__":
    show(exhibit())
