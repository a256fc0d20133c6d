"""What the first forward fills and later ones find is captured where it is the same every time, else run eagerly."""

from typing import Any

import pytest
import torch
from tests.ordinary import STEPS, Base, job, tokens
from tests.settling import CAPTURED, EAGER, MakesALayerAnew
from tests.unit.run.eager.test_against_eager import difference, plain_loop

from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially
from plait.run.verify import verify


@pytest.mark.parametrize("name", CAPTURED)
def test_what_does_not_change_any_more_is_captured(name: str) -> None:
    plain = plain_loop(CAPTURED[name]())
    for plan, ranks in (("single", 1), ("ddp", 2), ("zero3", 2)):
        made = CAPTURED[name]()
        record = run_serially(made, resolve(plan, ranks), STEPS, torch.float32)
        assert difference(made, plain, record) is None, plan
        assert not any("running eagerly" in notice for notice in record.notices), record.notices


@pytest.mark.parametrize("name", EAGER)
def test_what_changes_runs_eagerly(name: str) -> None:
    plain, made = plain_loop(EAGER[name]()), EAGER[name]()
    record = run_serially(made, resolve("single", 1), STEPS, torch.float32)
    assert difference(made, plain, record) is None
    assert record.notices[0].startswith("running eagerly: the forward changes Python state")


class Drops(MakesALayerAnew):
    """Its first forward draws weights that it throws away, before the numbers of the dropout."""

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().middle(h), 0.5)


def test_numbers_that_only_the_first_forward_draws_are_no_difference() -> None:
    outcome = verify(job(Drops), "ddp", 2, serial=True, steps=2)
    assert outcome.ok and outcome.eager_first is None, outcome


class Lengths(Base):
    """Samples of several lengths; `table` says what is kept of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(self.middle(self.first(self.words(x))))
        return (h * self.table(x.shape[1])[:, None]).sum(1)

    def table(self, length: int) -> torch.Tensor:
        raise NotImplementedError


class MadeAnew(Lengths):
    kept: torch.Tensor | None = None

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or len(self.kept) != length:
            self.kept = torch.linspace(0, 1, length)
        return self.kept


class GrowsWithLength(Lengths):
    kept: torch.Tensor | None = None

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None or len(self.kept) < length:
            self.kept = torch.arange(length) + 1.0
        return self.kept[:length] / 5


class OfTheFirstLength(Lengths):
    kept: float | None = None

    def table(self, length: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = 1 / length
        return torch.full((length,), self.kept)


def of_lengths(model: type[Lengths]) -> Job:
    def collate(samples: list[Any]) -> Any:
        longest = max(int(y) for _, y in samples) + 2
        return torch.stack([x[:longest] for x, _ in samples]), torch.stack([y for _, y in samples])

    data = [(x, torch.tensor(0 if i < 6 else i % 3)) for i, (x, _) in enumerate(tokens())]
    return job(model, data, collate=collate, shuffle=False)


@pytest.mark.parametrize(
    ("model", "is_captured"), [(MadeAnew, True), (GrowsWithLength, True), (OfTheFirstLength, False)]
)
def test_what_was_kept_of_another_shape(model: type[Lengths], is_captured: bool) -> None:
    plain, made = plain_loop(of_lengths(model)), of_lengths(model)
    record = run_serially(made, resolve("single", 1), STEPS, torch.float32)
    assert difference(made, plain, record) is None, record.notices
    assert is_captured == (not any("running eagerly" in notice for notice in record.notices)), record.notices
