"""Which tensors of a batch count samples: found in several samples, and held against every batch of a run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.errors import DataError
from plait.graph.batch import check_samples
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially

NUM_SAMPLES = 12


class Bags(nn.Module):
    """A few words a sample, all in one flat tensor, as EmbeddingBag takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(13, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))


def _objective(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["words"], batch["offsets"]), batch["classes"])


def _flat(samples: list[Any]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(words) for words, _ in samples])
    return {
        "words": torch.cat([words for words, _ in samples]),
        "offsets": F.pad(lengths.cumsum(0)[:-1], (1, 0)),
        "classes": torch.tensor([label for _, label in samples]),
    }


def _job(longest: int) -> Job:
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + index % longest for index in range(NUM_SAMPLES)]  # the first sample has one word
    return Job(
        model=Bags,
        data=[(torch.randint(0, 13, (n,), generator=generator), i % 3) for i, n in enumerate(lengths)],
        objective=_objective,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
        steps=2,
        collate=_flat,
    )


def test_what_the_first_sample_has_one_of_is_no_sample() -> None:
    job = _job(longest=4)
    captures = Captures(job)
    assert captures.layout.has_samples == (False, True, True)
    wanted = run_eager(job, 2, torch.float32, captures)
    found = run_serially(job, resolve("ddp", 2), 2, torch.float32, captures=captures)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
    torch.testing.assert_close(found.weights, wanted.weights)


def test_a_batch_that_shows_it_later_is_refused() -> None:
    captures = Captures(_job(longest=1))
    assert captures.layout.has_samples == (True, True, True)
    late = _flat([(torch.tensor([1, 2, 3]), 0), (torch.tensor([4]), 1)])
    with pytest.raises(DataError, match=r"batch of 2 samples has the shape \(4,\).*Samples 7, 3"):
        check_samples(captures.layout, late, (7, 3))


class Nested(nn.Module):
    """Takes samples of their own length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Any) -> Tensor:
        rows = self.first(torch.nested.as_nested_tensor(list(x), layout=torch.jagged))
        return self.last(torch.stack([row.tanh().mean(0) for row in rows.unbind()]))


def test_a_nested_tensor_is_refused_with_the_way_that_works() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(2 + index % 3, 4, generator=generator), index % 3) for index in range(NUM_SAMPLES)]

    def lists(samples: list[Any]) -> Any:
        return [words for words, _ in samples], torch.tensor([label for _, label in samples])

    def nested(samples: list[Any]) -> Any:
        words, labels = lists(samples)
        return torch.nested.nested_tensor(words, layout=torch.jagged), labels

    job = Job(
        model=Nested, data=data, loss=nn.CrossEntropyLoss(), batch=6, steps=2, collate=nested,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.raises(DataError, match="a nested tensor of 2 samples") as refused:
        Captures(job).of_size(4)
    assert "as_nested_tensor" in str(refused.value)
    other = replace(job, collate=lists)
    one = run_serially(other, resolve("single", 1), 2, torch.float64)
    wanted = run_eager(other, 2, torch.float64, Captures(other, None, torch.float64))
    assert one.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert run_serially(other, resolve("ddp", 2), 2, torch.float64).losses == pytest.approx(
        one.losses, rel=1e-12
    )
