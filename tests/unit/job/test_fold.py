"""Folds of the data: every sample is held out once, and what is held out is never read by training."""

from pathlib import Path

import pytest
import torch
from torch import nn

import plait
from plait.api.inputs.given import given_job
from plait.errors import DataError, UsageError
from plait.job.data.fold import Fold
from plait.job.data.open import open_data

SAMPLES, FOLDS = 23, 5


def folds(seed: int = 0, held_out: bool = False, data: object = None) -> list[Fold]:
    return [Fold(data=data, number=n, folds=FOLDS, seed=seed, held_out=held_out) for n in range(1, FOLDS + 1)]


def ids(fold: Fold) -> set[int]:
    return set(fold.ids(SAMPLES).tolist())


def test_every_sample_is_held_out_once_and_trained_on_otherwise() -> None:
    held = [ids(fold) for fold in folds(held_out=True)]
    assert sorted(index for part in held for index in part) == list(range(SAMPLES))
    assert [ids(fold) for fold in folds()] == [set(range(SAMPLES)) - part for part in held]
    assert {len(part) for part in held} == {4, 5}
    assert [ids(fold) for fold in folds(seed=1)] != [ids(fold) for fold in folds()]


class Rows(nn.Module):
    """A weight for every sample: those that were trained on have moved."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.rows[index]


def rows() -> plait.Job:
    everything = torch.arange(SAMPLES)
    return plait.Job(
        model=Rows, data=(everything, torch.ones(SAMPLES)), loss=nn.MSELoss(), batch=6, epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), evaluate=(everything, torch.ones(SAMPLES)),
    )  # fmt: skip


@pytest.mark.parametrize("number", [1, FOLDS])
def test_a_run_never_trains_on_what_it_holds_out(number: int, tmp_path: Path) -> None:
    settings = {"fold": f"{number}/{FOLDS}"}
    result = plait.train(
        rows(),
        "single",
        changes=plait.Changes(settings=settings),
        out=tmp_path / "run",
        saving=plait.Saving(trace=False),
    )
    moved = set(result.weights["rows"].nonzero().flatten().tolist())
    assert moved == ids(folds()[number - 1])
    assert result.evaluation["loss"] == 1.0, "it is evaluated on nothing but what it has not seen"


class Damaged(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if index % 2:
            raise OSError("torn")
        return index


def test_a_damaged_sample_is_not_replaced_by_one_that_is_held_out() -> None:
    for fold in folds(data=Damaged()):
        source = open_data(fold, skip_bad=SAMPLES)
        assert source.num_samples is not None
        assert set(source.fetch(torch.arange(source.num_samples)).tolist()) <= ids(fold)


def test_folds_of_a_subset_are_parts_of_it() -> None:
    subset = torch.utils.data.Subset(Damaged(), range(0, 20, 2))
    fold = Fold(data=subset, number=1, folds=2)
    found = open_data(fold).fetch(torch.arange(5)).tolist()
    assert found == (fold.ids(10) * 2).tolist()


def test_what_cannot_be_folded_is_told() -> None:
    for text in ("0/5", "6/5", "1/1", "half"):
        with pytest.raises(UsageError, match="fold="):
            given_job(rows(), plait.Changes(settings={"fold": text}))
    with pytest.raises(DataError, match="23 samples make no 24 folds"):
        open_data(given_job(rows(), plait.Changes(settings={"fold": "1/24"}))[0].data)
    with pytest.raises(DataError, match="stream"):
        open_data(Fold(data=lambda: iter([1, 2]), number=1, folds=2))


def test_lengths_stay_with_their_samples() -> None:
    job, _ = given_job(
        plait.Job(
            model=Rows, data=torch.arange(SAMPLES), objective=lambda m, b: m(b).mean(), batch=4,
            optimizer=torch.optim.SGD, lengths=list(range(SAMPLES)),
        ),
        plait.Changes(settings={"fold": "2/5"}),
    )  # fmt: skip
    assert job.lengths is not None and set(job.lengths) == ids(folds()[1])
