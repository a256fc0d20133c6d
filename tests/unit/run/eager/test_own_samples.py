"""Batches that hold something of every sample for itself: boxes of images, sequences of their own length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ordinary import NUM_SAMPLES, STEPS, Base, job, vectors
from tests.unit.run.eager.test_against_eager import difference, plain_loop
from torch import Tensor, nn

from plait.job.batch import Objects
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.serial_run import run_serially


def images_with_boxes() -> list[Any]:
    draws = torch.Generator().manual_seed(1)
    made = []
    for index in range(NUM_SAMPLES):
        number = index % 3 + 1
        boxes, labels = torch.rand(number, 4, generator=draws), torch.arange(number) % 3
        made.append((torch.randn(2, 6, 6, generator=draws), {"boxes": boxes, "labels": labels}))
    return made


def stacked(samples: list[Any]) -> Any:
    return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]


def as_in_torchvision(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.boxes, self.labels = nn.Conv2d(2, 4, 3), nn.Linear(64, 12), nn.Linear(64, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x).relu().flatten(1)
        return self.boxes(h).view(-1, 3, 4), self.labels(h).view(-1, 3, 3)


def total_of(model: Any, batch: Any) -> tuple[Any, int]:
    images, targets = batch
    boxes, labels = model(images if isinstance(images, Tensor) else torch.stack(list(images)))
    total, count = 0.0, 0
    for at, target in enumerate(targets):
        number = len(target["labels"])
        total = total + (boxes[at, :number] - target["boxes"]).abs().sum()
        total = total + F.cross_entropy(labels[at, :number], target["labels"], reduction="sum")
        count += number
    return total, count


def per_box(model: Any, batch: Any) -> Tensor:
    total, count = total_of(model, batch)
    return total / count


def per_six(model: Any, batch: Any) -> Tensor:
    return total_of(model, batch)[0] / 6


def as_pair(model: Any, batch: Any) -> tuple[Tensor, int]:
    return total_of(model, batch)


@pytest.mark.parametrize("collate", [stacked, as_in_torchvision])
@pytest.mark.parametrize("objective", [per_box, per_six, as_pair])
def test_detection_equals_the_plain_loop(collate: Callable[..., Any], objective: Callable[..., Any]) -> None:
    def make() -> Job:
        return job(Detector, images_with_boxes(), objective=objective, collate=collate)

    plain = plain_loop(make())
    for plan, ranks in (("single", 1), ("ddp", 2), ("zero3", 2)):
        record = run_serially(make(), resolve(plan, ranks), STEPS, torch.float32)
        assert difference(make(), plain, record) is None, (plan, record.notices)


def test_a_pair_of_tensors_made_of_two_samples_is_no_list_of_samples() -> None:
    source = open_data(vectors(), lambda samples: [torch.stack(c) for c in zip(*samples, strict=True)])
    for number in (2, 3, 1, 2):
        batch = source.fetch(torch.arange(number))
        assert not isinstance(batch, Objects) and [len(entry) for entry in batch] == [number, number]


def test_lists_are_told_by_one_sample_more_once() -> None:
    calls: list[int] = []

    def collate(samples: list[Any]) -> Any:
        calls.append(len(samples))
        return {"x": [x for x, _ in samples], "y": torch.stack([y for _, y in samples])}

    source = open_data(vectors(), collate)
    batches = [source.fetch(torch.arange(number)) for number in (2, 3, 4)]
    assert calls == [2, 3, 3, 4]
    assert all(isinstance(batch["x"], Objects) for batch in batches)


class SumOverAll(Base):
    """Runs eagerly for a file that it reads."""

    def middle(self, h: Tensor) -> Tensor:
        with open(__file__) as file:
            return h * (1.0 if file.read(1) else 2.0)


def test_a_sum_by_a_number_that_does_not_follow_the_share_is_a_sum() -> None:
    def objective(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 6

    made = job(SumOverAll, objective=objective)
    record = run_serially(made, resolve("ddp", 2), STEPS, torch.float32)
    assert difference(made, plain_loop(job(SumOverAll, objective=objective)), record) is None


def with_own_targets(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "targets": [x[: int(y) + 1] for x, y in samples]}


def mean_of_means(model: Any, batch: Any) -> Tensor:
    """A mean over the samples of means over one, two or three numbers: of one sample alone it looks like the latter."""
    pairs = zip(model(batch["x"]), batch["targets"], strict=True)
    losses = [F.mse_loss(out[: len(target)], target) for out, target in pairs]
    return sum(losses[1:], losses[0]) / len(losses)


def test_means_over_targets_of_samples_count_by_samples_in_a_share_of_one_too() -> None:
    def make() -> Job:
        return job(Base, objective=mean_of_means, collate=with_own_targets, batch=3)

    plain = plain_loop(make())
    for plan in ("ddp", "zero3"):
        record = run_serially(make(), resolve(plan, 2), STEPS, torch.float32)
        assert difference(make(), plain, record) is None, (plan, record.notices)
