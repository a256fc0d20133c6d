"""Models whose graph differs by sample are ordinary jobs: exact against one vertex, one sample after the other."""

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.unit.dynamic.trees import BinaryCell, Recursive, trees
from torch import Tensor, nn
from torch.utils.data import Dataset

import plait
from plait.errors import DataError
from plait.job.batch import Objects, map_objects
from plait.job.data.open import open_data


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


@dataclass
class Node:
    """A tree as people write it: with floating inputs, which a proof in float64 has to widen."""

    input: Tensor
    children: list["Node"]

    @staticmethod
    def of(nested: Any) -> "Node":
        if not isinstance(nested, tuple):
            return Node(torch.full((5,), float(nested)), [])
        children = [Node.of(part) for part in nested]
        return Node(torch.stack([child.input for child in children]).mean(0), children)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.seen = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, own: Tensor, states: Tensor) -> Tensor:
        return torch.tanh(self.own(own) + self.seen(states).sum(0))


class OfObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree = plait.Vertices(Sum(), state=6)
        self.out = nn.Linear(6, 3)

    def forward(self, samples: list[Node]) -> Tensor:
        roots = self.tree(samples).roots
        assert isinstance(roots, Tensor)
        return self.out(roots)


class OfTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree = plait.Batched(Recursive())

    def forward(self, samples: list[Any]) -> Tensor:
        assert all(isinstance(sample, tuple) for sample in samples)
        return self.tree(samples)


def _kept(samples: list[Any]) -> tuple[list[Any], Tensor]:
    return [tree for tree, _ in samples], torch.tensor([label for _, label in samples])


@pytest.mark.parametrize(("model", "collate"), [(OfObjects, None), (OfObjects, _kept), (OfTuples, None)])
def test_objects_with_tensors_and_nested_tuples_are_samples(model: type[nn.Module], collate: Any) -> None:
    nested = trees(3, *(2 + index % 4 for index in range(12)))
    torch.manual_seed(0)
    made = plait.Job(
        model=model(), loss=nn.CrossEntropyLoss(), batch=3, collate=collate,
        data=[(Node.of(tree) if model is OfObjects else tree, at % 3) for at, tree in enumerate(nested)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    proof = plait.verify(made, "ddp", 2, serial=True, steps=1)
    assert proof.ok, proof


def test_wide_tensors_in_objects_are_narrowed_for_a_model_that_cannot_take_them() -> None:
    nested = trees(3, *(2 + index % 4 for index in range(8)))
    wide = [map_objects(lambda tensor: tensor.double(), Objects([Node.of(tree)]))[0] for tree in nested]
    made = plait.Job(
        model=OfObjects(), loss=nn.CrossEntropyLoss(), batch=4, data=[(tree, at % 3) for at, tree in enumerate(wide)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    result = plait.train(made, "single", steps=2)
    assert len(result.losses) == 2


def test_tensors_in_objects_are_moved() -> None:
    class Local:  # which nobody finds by its name
        def __init__(self, node: Node) -> None:
            self.node = node

    shared = torch.ones(2, 3)
    chain = Node(shared, [])
    for _ in range(10_000):
        chain = Node(shared, [chain])
    pair = Node(shared, [Node(shared, []), Node(torch.zeros(4, dtype=torch.int64), [])])
    for objects in ([pair], [Local(pair)], [pair, chain], [(torch.ones(3), ("a", pair))]):
        moved: Any = map_objects(lambda tensor: tensor.to("meta"), Objects(objects))
        left, devices = list(moved), set()
        by_shape: dict[Any, set[int]] = {}
        while left:
            now = left.pop()
            if isinstance(now, Tensor):
                devices.add(now.device.type)
                by_shape.setdefault((now.shape, now.dtype), set()).add(id(now))
            elif not isinstance(now, str):
                left.extend(now if isinstance(now, tuple | list) else vars(now).values())
        assert devices == {"meta"}
        assert len(by_shape[shared.shape, torch.float32]) == 1  # shared before, shared after
    assert shared.device.type == "cpu" and pair.children[1].input.device.type == "cpu"


def test_objects_that_cannot_be_copied_are_told() -> None:
    objects = Objects([Tree(threading.Lock())])
    with pytest.warns(UserWarning, match="stay as they are"):
        assert map_objects(lambda tensor: tensor.double(), objects) is objects


def test_a_sample_may_be_nested_as_deep_as_it_likes() -> None:
    deep: Any = 3
    for number in range(20_000):
        deep = (deep, number)
    for collate in (None, _kept):
        source = open_data([(deep, 0), ((1, 2), 1), ((1, (2, 3)), 1)], collate)
        batch = source.fetch(torch.tensor([1, 0]))
        assert batch[0][0] == (1, 2) and batch[0][1] is deep and batch[1].tolist() == [1, 0]


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
