"""Code for one sample, run for many at once: equal to one after the other, and what cannot be is named."""

import copy
from typing import Any

import pytest
import torch
from tests.unit.dynamic.trees import Recursive, trees
from torch import Tensor, nn

from plait import Batched
from plait.errors import DataError


def both(model: Batched, batch: list[Any]) -> float:
    """The greatest difference between together and one by one, of results and all gradients."""
    found = []
    for batched in (True, False):
        model.batched = batched
        model.zero_grad()
        out = model(batch)
        out = out if isinstance(out, Tensor) else torch.cat([part.reshape(-1) for part in out])
        (out**2).sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) and found[0][0].abs().max() > 1e-6
    model.batched = True
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("sizes", [(1,), (4, 1, 9, 13)])
def test_recursion_for_one_tree_runs_for_many(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Batched(Recursive().double())
    assert both(model, trees(2, *sizes)) < 1e-13
    assert model.last is not None and model.last.num_vertices >= sum(model.last.group_sizes[1:])


def test_alike_operations_run_together() -> None:
    model = Batched(Recursive())
    model(trees(0, 8, 8, 8, 8, 8, 8, 8, 8))
    assert model.last is not None
    assert len(model.last.group_sizes) < model.last.num_vertices / 5


class Code(nn.Module):
    """Runs a function of (self, sample), with layers to use."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        self.long, self.gated = nn.LSTMCell(3, 3, dtype=torch.float64), nn.GRUCell(3, 3, dtype=torch.float64)
        self.function = function

    def forward(self, sample: Any) -> Any:
        return self.function(self, sample)


def branches(self: Any, x: Tensor) -> Tensor:
    made = self.one(x)
    if made.sum() > 0:
        made = self.two(made)
    while float(made.abs().max()) > 1.0:
        made = made * 0.5
    return made


def in_place(self: Any, x: Tensor) -> Tensor:
    total = self.one(x)
    again = total
    total += self.two(x)
    return again * 2


def accumulates(self: Any, x: Tensor) -> Tensor:
    total: Any = 0
    for index in range(1 + int(x[0].abs() * 3) % 3):
        total = total + torch.relu(self.one(x + index))
    return total


def of_parameters(self: Any, x: Tensor) -> Tensor:
    return (x @ self.weight.t()).softmax(-1) - torch.stack([x, x]).mean(0) / (self.weight.norm() + 1)


def indexes(self: Any, x: Tensor) -> Tensor:
    best = self.one(x).argmax(-1, keepdim=True)
    picked = self.weight[best][0]
    return torch.where(x > 0, picked, -picked)[:2] + x.unsqueeze(0).expand(2, 3)[:, 1]


def cells(self: Any, x: Tensor) -> Any:
    state, hidden = None, None
    for _ in range(1 + int(x[0] > 0)):
        state = self.long(x, state)
        hidden = self.gated(state[0], hidden)
    return hidden


CODES = [branches, in_place, accumulates, of_parameters, indexes, cells]


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_ordinary_code_is_exact(code: Any, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(1)
    model = Batched(Code(code))
    assert both(model, [torch.randn(3, dtype=torch.float64) for _ in range(6)]) < 1e-13
    assert not [warned for warned in recwarn.list if "one by one" in str(warned.message)]


def views_in_place(self: Any, x: Tensor) -> Tensor:
    made = self.one(x)
    made[:2].mul_(3.0)
    return made


def writes(self: Any, x: Tensor) -> Tensor:
    made = self.one(x)
    made[0] = 1.0
    return made


def index_of_one(self: Any, x: Tensor) -> Tensor:
    return self.weight[self.one(x).argmax()]


def a_cell_by_its_function(self: Any, x: Tensor) -> Tensor:
    return torch.gru_cell(x[None], x[None], *self.gated.parameters())


def printed(self: Any, x: Tensor) -> Tensor:
    return self.one(x) * float(f"{self.two(x).sum():.3f}")


def sizes_by_value(self: Any, x: Tensor) -> Tensor:
    return self.one(x)[x > 0].sum().reshape(1)


@pytest.mark.parametrize(
    "code",
    [views_in_place, writes, index_of_one, a_cell_by_its_function, printed, sizes_by_value],
    ids=lambda code: code.__name__,
)
def test_what_cannot_be_recorded_runs_one_by_one_and_is_named(code: Any) -> None:
    torch.manual_seed(1)
    model = Batched(Code(code))
    batch = [torch.randn(3, dtype=torch.float64) for _ in range(3)]
    with pytest.warns(UserWarning, match="samples run one by one: "):
        made = model(batch)
    assert torch.equal(made, torch.stack([model.module(x) for x in batch]))


def test_errors_of_the_code_name_the_sample() -> None:
    chain: Any = 1
    for _ in range(10_000):
        chain = (chain, 1)
    model = Batched(Recursive())
    with pytest.raises(DataError, match=r"sample 1 of the batch: the code calls itself more than .* deep"):
        model([(1, 2), chain])
    with pytest.raises(IndexError) as raised:
        model([(1, 2), (1, 9999)])
    assert raised.value.__notes__ == ["At sample 1 of the batch."]
    with pytest.raises(TypeError) as told:
        model([(1, 2), (1, None)])
    assert told.value.__notes__ == ["At sample 1 of the batch."]
    assert len(model([(1, 2)])) == 1 and model.last is not None, "it still runs together"


def test_a_branch_on_random_numbers_runs_one_by_one() -> None:
    def code(self: Any, x: Tensor) -> Tensor:
        made = torch.dropout(self.one(x), 0.5, train=True)
        return made if made.sum() > 0 else -made

    with pytest.warns(UserWarning, match="depends on random numbers"):
        Batched(Code(code))([torch.randn(3, dtype=torch.float64)])


def test_results_of_several_shapes_and_copies() -> None:
    model = Batched(Code(lambda self, x: {"a": self.one(x), "b": x.new_ones(len(x)) * self.two(x).sum()}))
    batch = [torch.randn(3, dtype=torch.float64) for _ in range(4)]
    made = model(batch)
    assert made["a"].shape == (4, 3) and made["b"].shape == (4, 3)
    assert torch.equal(copy.deepcopy(model)(batch)["a"], made["a"])
    ragged = Batched(Code(lambda self, x: self.one(x)[: 1 + int(x[0] > 0)]))
    assert [len(part) for part in ragged(batch)] == [1 + int(x[0] > 0) for x in batch]
    with pytest.raises(DataError, match="no sample"):
        model([])


def test_code_without_a_branch_is_one_operation() -> None:
    torch.manual_seed(0)
    model = Batched(Recursive().double())
    model(trees(0, 5, 9))
    groups = model.last.group_sizes  # type: ignore[union-attr]
    assert model.last.num_vertices > 5 * sum(groups[1:]), "a cell's operations are ordered as one"  # type: ignore[union-attr]


def test_a_branch_that_is_met_later_divides_what_was_one() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))

        def forward(self, sample: tuple[int, Tensor]) -> Tensor:
            count, x = sample
            x = torch.tanh(self.first(x))
            for _ in range(count):
                x = torch.sigmoid(self.second(x)) + x
            return x * 2

    torch.manual_seed(0)
    module = Sometimes()
    model = Batched(module)
    for counts in ((0, 0), (1, 1), (0, 2, 1, 5), (3,)):
        samples = [(count, torch.randn(3, dtype=torch.float64)) for count in counts]
        grads = []
        for outs in (model(samples), torch.stack([module(sample) for sample in samples])):
            module.zero_grad()
            outs.square().sum().backward()
            grads.append(
                [outs.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
            )
        assert len(grads[0]) == len(grads[1])
        for ours, theirs in zip(*grads, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)
