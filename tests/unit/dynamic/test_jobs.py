"""Models whose graph differs by sample are ordinary jobs: exact against one vertex, one sample after the other."""

from typing import Any

import pytest
import torch
from tests.unit.dynamic.trees import BinaryCell, Recursive, trees
from torch import Tensor, nn
from torch.utils.data import Dataset

import plait
from plait.errors import DataError


class Tree:
    """An object that no tensor can be made of."""

    def __init__(self, nested: Any) -> None:
        self.nested = nested


class Labelled(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self._trees = trees(3, *(1 + 3 * (index % 4) for index in range(count)))

    def __len__(self) -> int:
        return len(self._trees)

    def __getitem__(self, index: int) -> tuple[Tree, int]:
        return Tree(self._trees[index]), index % 3


class ByVertex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree = plait.Vertices(BinaryCell(), state=(6, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, samples: list[Tree]) -> Tensor:
        return self.out(self.tree([sample.nested for sample in samples]).roots[0])


class ByCode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree = plait.Batched(Recursive())

    def forward(self, samples: list[Tree]) -> Tensor:
        return self.tree([sample.nested for sample in samples])


def job(model: type[nn.Module]) -> plait.Job:
    torch.manual_seed(0)
    return plait.Job(
        model=model(), data=Labelled(24), loss=nn.CrossEntropyLoss(), batch=7,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )  # fmt: skip


@pytest.mark.parametrize(("model", "plan"), [(ByVertex, "ddp"), (ByVertex, "zero3"), (ByCode, "ddp")])
def test_shares_of_trees_are_exact(model: type[nn.Module], plan: str) -> None:
    proof = plait.verify(job(model), plan, 2, serial=True, steps=2)
    assert proof.ok, proof


def test_pipelines_and_tensors_are_refused_with_the_reason() -> None:
    for plan in ("1f1b", "megatron"):
        with pytest.raises(plait.PlaitError, match="text or objects"):
            plait.verify(job(ByVertex), plan, 2, serial=True)


def test_tensors_of_unequal_shapes_are_still_refused() -> None:
    class Ragged(Labelled):
        def __getitem__(self, index: int) -> Any:
            return Tree(0), torch.zeros(1 + index)

    ragged = plait.Job(
        model=ByVertex(),
        data=Ragged(8),
        loss=lambda scores, target: scores.mean() + target.mean(),
        batch=4,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )
    with pytest.raises(DataError, match="cannot be put into one batch"):
        plait.train(ragged, "single", steps=1)
