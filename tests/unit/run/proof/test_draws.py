"""Random numbers that are wrong on both sides of every other comparison are found by their statistics.

Thresholds are 7 and 8 standard deviations; each fault here is at least 10 of them, so neither depends on the seed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.graph.ops import draws as rules
from plait.graph.ops import random as numbers
from plait.graph.ops.draws import Drawn
from plait.graph.ops.random_hash import generate
from plait.graph.rewrite import random_ops
from plait.run.proof.draws import check_draws

aten = torch.ops.aten
CASES: dict[str, tuple[Any, dict[str, Any], torch.dtype]] = {
    "dropout": (aten.native_dropout.default, {"input": torch.randn(16, 32), "p": 0.1, "train": True}, torch.bool),
    "bernoulli_": (aten.bernoulli_.float, {"self": torch.empty(16, 32), "p": 0.9}, torch.float32),
    "paths": (aten.bernoulli_.float, {"self": torch.empty(8, 1), "p": 0.9}, torch.float32),
    "rare": (aten.bernoulli_.float, {"self": torch.empty(64, 100), "p": 0.98}, torch.float32),
    "by_tensor": (aten.bernoulli.default, {"self": torch.rand(16, 32)}, torch.float32),
    "normal": (aten.randn_like.default, {"self": torch.empty(4, 7, 5)}, torch.float32),
    "uniform": (aten.rand.default, {"size": [16, 32]}, torch.float32),
    "integers": (aten.randint.low, {"low": -1, "high": 9, "size": [16, 3]}, torch.int64),
    "exponential": (aten.exponential_.default, {"self": torch.empty(16, 5), "lambd": 2.0}, torch.float32),
}  # fmt: skip


def drawn(name: str, number: int, batch_dim: int = 0) -> Drawn:
    op, given, dtype = CASES[name]
    shape = tuple(given["size"] if "size" in given else next(iter(given.values())).shape)
    return Drawn(
        op=op, given=given, number=number, shape=shape, dtype=dtype, place=number,
        placement={"batch_dim": batch_dim, "rows_per_sample": 1},
    )  # fmt: skip


def wrong(name: str) -> list[str]:
    """What is found of two draws."""
    found, told = check_draws([[drawn(name, 3), drawn(name, 4)]], seed=5)
    assert found and told is not None and told.startswith("random numbers: statistics of the 2 draws")
    return [entry.name for entry in found if not entry.ok]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch_dim", [0, -1])
def test_numbers_are_as_torchs_and_apart(name: str, batch_dim: int) -> None:
    for seed in (0, 11):
        found, _ = check_draws([[drawn(name, n, batch_dim) for n in (0, 1, 7)]], seed)
        assert not [entry for entry in found if not entry.ok]
        kinds = {entry.kind for entry in found}
        assert kinds == {"draws", "independence"}


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    """Let all numbers be made by `change(make, key, number, shape, dtype, *parameters, **placement)`."""

    def of(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **placement: change(make, *args, **placement)

    made = {target: of(make) for target, make in numbers.IMPLEMENTATIONS.items()}
    monkeypatch.setattr(numbers, "IMPLEMENTATIONS", made)


def same_rows(make: Any, *args: Any, **placement: Any) -> Tensor:
    found = make(*args, **placement)
    return found[:1].expand_as(found).clone()


def pairs_of_rows(make: Any, *args: Any, **placement: Any) -> Tensor:
    found = make(*args, **placement)
    return found[::2].repeat_interleave(2, 0)[: len(found)]


def same_columns(make: Any, *args: Any, **placement: Any) -> Tensor:
    found = make(*args, **placement)
    return found[..., :1].expand_as(found).clone()


def same_draws(make: Any, key: Tensor, number: int, *args: Any, **placement: Any) -> Tensor:
    return make(key, 0, *args, **placement)


def same_steps(make: Any, key: Tensor, *args: Any, **placement: Any) -> Tensor:
    return make(torch.stack([key[0], torch.tensor(1), key[2]]), *args, **placement)


def same_seeds(make: Any, key: Tensor, *args: Any, **placement: Any) -> Tensor:
    return make(torch.stack([torch.tensor(1), key[1], key[2]]), *args, **placement)


@pytest.mark.parametrize(
    "fault", [same_rows, pairs_of_rows, same_columns, same_draws, same_steps, same_seeds]
)
@pytest.mark.parametrize("name", ["dropout", "normal"])
def test_numbers_that_depend_on_each_other_are_found(
    name: str, fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, fault)
    assert wrong(name)


def test_masks_of_whole_samples_that_are_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, same_rows)
    assert wrong("paths")


@pytest.mark.parametrize("name", ["dropout", "bernoulli_", "paths", "rare"])
@pytest.mark.parametrize("off", [1.1, 0.9])
def test_a_rate_that_is_a_tenth_off_is_found(name: str, off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(
        make: Any, key: Tensor, number: int, shape: Any, dtype: Any, p: float, **placement: Any
    ) -> Tensor:
        return make(key, number, shape, dtype, 1 - off * (1 - p), **placement)

    changed(monkeypatch, rate)
    assert wrong(name)


@pytest.mark.parametrize("off", [1.1, 0.9])
def test_a_scale_that_is_a_tenth_off_is_found(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(rules.RULES)

    def dropout(draw: Any, given: Any) -> Any:
        value, mask = known["aten::native_dropout"](draw, given)
        return value * off, mask

    def uniform(draw: Any, given: Any) -> Any:
        return known["aten::rand"](draw, given) * off

    changed_rules = known | {"aten::native_dropout": dropout, "aten::rand": uniform}
    monkeypatch.setattr(rules, "RULES", changed_rules)
    assert wrong("dropout") and wrong("uniform")
    assert not wrong("normal")


def test_code_that_sets_the_generator_back_draws_the_same_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    op, given, dtype = CASES["uniform"]
    again = [
        Drawn(op=op, given=given, number=3, shape=(16, 32), dtype=dtype, place=(b"seed", 0), placement={})
        for _ in range(2)
    ]
    found, _ = check_draws([again], seed=5)
    assert all(entry.ok for entry in found)


class Dropped(nn.Module):
    """Two dropouts, which `counts` makes run eagerly."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3)
        self.count, self.counts = 0, counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.count += 1
        return self.last(self.drop(torch.relu(self.drop(self.first(x)))))


@pytest.mark.parametrize("counts", [False, True])
def test_verify_finds_masks_that_are_alike_in_all_layers(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of all other comparisons have the same masks, so they see nothing."""
    made = torch.Generator().manual_seed(1)
    job = plait.Job(
        model=lambda: Dropped(counts), batch=8, steps=2, loss=nn.CrossEntropyLoss(),
        data=(torch.randn(32, 6, generator=made), torch.randint(0, 3, (32,), generator=made)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    right = plait.verify(job, "ddp", 2, serial=True)
    assert right.ok and {entry.kind for entry in right.draws} == {"draws", "independence"}
    monkeypatch.setattr(numbers, "generate", lambda key, op, *args, **given: generate(key, 0, *args, **given))
    found = plait.verify(job, "ddp", 2, serial=True)
    assert not found.ok and found.first is None and found.eager_first is None
    assert found.draws_first is not None and found.draws_first.kind == "independence"
    assert "1 and bernoulli_ 2" in found.draws_first.name


def test_a_graph_that_draws_with_another_rate_than_the_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where draws do not match, the code cannot be compared; a rate that is another is a difference."""
    call = random_ops._GraphDraw.call

    def other(self: Any, target: Any, *args: Any, **given: Any) -> Any:
        if target is torch.ops.plait.bernoulli.default:
            args = (*args[:-1], args[-1] - 0.02)
        return call(self, target, *args, **given)

    monkeypatch.setattr(random_ops._GraphDraw, "call", other)
    made = torch.Generator().manual_seed(1)
    job = plait.Job(
        model=lambda: Dropped(False), batch=8, steps=2, loss=nn.CrossEntropyLoss(),
        data=(torch.randn(32, 6, generator=made), torch.randint(0, 3, (32,), generator=made)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    found = plait.verify(job, "single", 1, serial=True)
    assert found.eager_first is not None and "probability 0.8 are drawn with 0.78" in found.eager_first.name
    with pytest.raises(plait.PlaitError, match="probability 0.8 are drawn with 0.78"):
        plait.train(job, "single", 1, out=tmp_path / "run")
