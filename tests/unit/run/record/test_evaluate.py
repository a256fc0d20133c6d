"""Evaluation over any number of ranks counts each sample once; `Progress` tells when to stop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import ZOO, unstack, vectors
from torch import Tensor, nn

from plait import Job, Until
from plait.job.data.open import open_data
from plait.run.hold.state import ModelState
from plait.run.record.evaluate import Kept, Progress, evaluate

CPU = torch.device("cpu")


def measured(job: Job, data: Any, ranks: int, *, alike: bool = False) -> dict[str, float]:
    """What all ranks together find: each rank's sums, added up here."""
    state = ModelState(job, CPU)
    source = open_data(data, job.collate)
    sums: list[Tensor] = []

    def keep(own: Tensor) -> Tensor:
        sums.append(own.clone())
        return torch.stack(sums).sum(0)

    found = [evaluate(state, source, rank, ranks, keep, alike=alike) for rank in range(ranks)]
    assert state.model.training  # as it was before
    return found[-1]


def job(**changes: Any) -> Job:
    metrics = {
        "accuracy": lambda output, target: (output.argmax(1) == target).float().mean(),
        "right": lambda output, target: ((output.argmax(1) == target).sum(), torch.tensor(len(target))),
    }
    return replace(ZOO["mlp"].job(batch=8), metrics=metrics, **changes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["list", "stream"])
def test_each_sample_counts_once(ranks: int, kind: str) -> None:
    inputs, targets = vectors(29, 3)
    samples = unstack((inputs, targets))
    data: Any = samples if kind == "list" else (lambda: iter(samples))
    found = measured(job(), data, ranks)
    assert measured(job(), data, ranks, alike=True) == found
    with torch.no_grad():
        output = ModelState(job(), CPU).model(inputs)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == targets).double().mean()))
    assert found["right"] == pytest.approx(found["accuracy"])
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, targets)), rel=1e-6)


def test_more_ranks_than_samples() -> None:
    data = unstack(vectors(2, 3))
    assert measured(job(), data, 4) == pytest.approx(measured(job(), data, 1))
    assert measured(job(), data, 4, alike=True) == measured(job(), data, 4)


def test_ignored_targets_and_class_weights_count_as_in_the_loss() -> None:
    inputs, targets = vectors(13, 3)
    targets[::3] = -100
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 2, 10))
    with torch.no_grad():
        expected = float(loss(ModelState(job(), CPU).model(inputs), targets))
    found = measured(replace(ZOO["mlp"].job(batch=8), loss=loss), unstack((inputs, targets)), 3)
    assert found == {"loss": pytest.approx(expected, rel=1e-6)}


def test_dropout_is_off() -> None:
    noisy = replace(job(), model=lambda: nn.Sequential(nn.Linear(16, 10), nn.Dropout(0.9)))
    data = unstack(vectors(8, 0))
    assert measured(noisy, data, 1) == measured(noisy, data, 1)


def sequence(until: Until, values: list[float]) -> list[bool]:
    progress = Progress(until)
    return [progress.reached({until.metric: value}) is not None for value in values]


Case = tuple[Until, list[float], list[bool]]
CASES: dict[str, Callable[[], Case]] = {
    "target": lambda: (Until(target=0.5), [0.9, 0.6, 0.5, 0.4], [False, False, True, True]),
    "highest": lambda: (Until(metric="a", target=0.9, mode="max"), [0.1, 0.95], [False, True]),
    "patience": lambda: (Until(patience=2), [3, 2, 2, 2, 1], [False, False, False, True, False]),
    "patience of 1": lambda: (Until(patience=1), [1, 1], [False, True]),
    "not a number": lambda: (Until(patience=2), [1, float("nan"), float("nan")], [False, False, True]),
}


@pytest.mark.parametrize("name", CASES)
def test_when_to_stop(name: str) -> None:
    until, values, expected = CASES[name]()
    assert sequence(until, values) == expected


def test_without_until_nothing_stops() -> None:
    assert Progress(None).reached({"loss": 0.0}) is None


def test_progress_survives_a_checkpoint() -> None:
    first = Progress(Until(patience=2))
    first.reached({"loss": 1.0})
    first.reached({"loss": 1.0})
    second = Progress(Until(patience=2))
    second.load(first.state() | Kept(None).state())
    assert second.reached({"loss": 1.0}) == "loss has not improved on 1 for 2 evaluations"
