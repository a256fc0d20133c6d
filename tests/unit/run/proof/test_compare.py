"""What a verification compares: every row can fail, and none is NaN."""

import math
from dataclasses import replace

import pytest
import torch
from tests.zoo import ZOO
from torch import Tensor, nn

import plait
from plait.run.hold.away.copies import distance, spread
from plait.run.proof.compare import compare, relative
from plait.run.proof.serial_run import Record
from plait.run.verify import verify

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        ([1.0, -INF], [1.0, -INF], 0.0),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [NAN, 3.0], 1.0),
        ([-INF, 2.0], [INF, 2.0], INF),
        ([-INF, 2.0], [0.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([NAN, 2.0], [-INF, 2.0], INF),
        ([1.0], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
def test_distance_is_a_number_whatever_is_compared(
    ours: list[float], theirs: list[float], wanted: float
) -> None:
    assert distance(torch.tensor(ours), torch.tensor(theirs)) == wanted


def test_a_difference_is_relative_to_the_largest_finite_value() -> None:
    masked = torch.tensor([4.0, -INF, NAN, 1.0], dtype=torch.float64)
    other = masked.clone()
    other[3] = 2.0
    assert relative(masked, other, 0.0) == 0.25
    assert relative(masked, other, 8.0) == 0.125


def record(**changed: object) -> Record:
    weights = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    plain = Record(
        losses=(1.0, 0.5), norms=(3.0, 2.0), gradients=(weights, weights), weights=weights, buffers={},
        spread=0.0, notices=(),
    )  # fmt: skip
    return replace(plain, **changed)  # type: ignore[arg-type]


FAULTS = {
    "loss": {"losses": (1.0, NAN)},
    "gradient": {"gradients": ({"w": torch.ones(2)}, {"w": torch.ones(2)})},
    "norm": {"norms": (3.0, 2.1)},
    "weight": {"weights": {"w": torch.ones(3)}},
    "buffer": {"buffers": {"unknown": torch.ones(1)}},
    "spread": {"spread": 1e-30},
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("rough", [False, True])
def test_every_row_can_fail(kind: str, rough: bool) -> None:
    limits = {"rough": rough, "tolerance": 1e-9, "weight_tolerance": 1e-9}
    assert all(entry.ok for entry in compare(record(), record(), **limits))  # type: ignore[arg-type]
    found = compare(record(), record(**FAULTS[kind]), **limits)  # type: ignore[arg-type]
    assert {entry.kind for entry in found if not entry.ok} == {kind}
    assert not any(math.isnan(entry.largest) for entry in found)


def test_a_norm_has_the_tolerance_of_its_own_step() -> None:
    other = record(norms=(3.0 * (1 + 5e-5), 2.0 * (1 + 5e-5)))
    found = compare(record(), other, rough=True, tolerance=1e-5, weight_tolerance=1e-5)
    assert [(entry.tolerance, entry.ok) for entry in found if entry.kind == "norm"] == [
        (1e-5, False),
        (1e-3, True),
    ]


def test_copies_that_differ_spread() -> None:
    one, other = torch.tensor([1.0, -INF]), torch.tensor([1.5, -INF])
    assert spread([{"w": one}, {"w": one.clone()}, {"v": other}]) == 0.0
    assert spread([{"w": one}, {"w": other}]) == 0.5


class Masked(nn.Module):
    """A causal mask with -inf, as many models keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.full((8, 8), -INF).triu(1))
        self.register_buffer("unset", torch.full((2,), NAN))
        self.layer = nn.Linear(16, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x).unsqueeze(-2) + self.mask
        return self.out(torch.softmax(scores, -1).sum(-2))


def test_a_mask_of_infinities_is_equal_to_itself() -> None:
    job = replace(ZOO["mlp"].job(), model=Masked)
    assert isinstance(job, plait.Job)
    found = verify(job, "ddp", 2, steps=1, serial=True)
    assert found.ok, found.first
    assert [entry.largest for entry in found.differences if entry.kind == "buffer"] == [0.0]
