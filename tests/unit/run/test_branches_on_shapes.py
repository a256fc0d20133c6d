"""Models that branch on the length of their batch, so that batches do not all train the same parameters."""

from dataclasses import replace

import pytest
import torch
from tests.unit.run.test_varying_shapes import WIDTH, WORDS, Block, causal_loss, job_of
from torch import Tensor, nn

from plait.errors import JobError, PlanError
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.job.order import micro_batch_sizes
from plait.plan.named import resolve
from plait.run.hold.state import ModelState
from plait.run.proof.serial_run import run_serially

STEPS = 6


class ForLong(nn.Module):
    """A layer is used for long batches only: in others it has no gradient, and AdamW leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.extra = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WORDS),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        if x.shape[1] > 20:
            h = h + self.extra(h).tanh()
        out: Tensor = self.head(h)
        return out


def job_with(accumulate: int) -> Job:
    """Batches of four, of which some are long; in two of the steps all micro-batches are short."""
    job = job_of("causal", batch=4, accumulate=accumulate, count=24)
    lengths = [8, 25, 9, 7, 6, 5, 8, 9, 7, 10, 26, 28, 9, 9, 9, 9, 24, 5, 6, 23, 8, 9, 24, 7]
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]
    return replace(job, model=ForLong, data=data, shuffle=False, steps=STEPS)


def plain(job: Job, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """A loop over the parts that ranks pad by themselves, divided by all words at once."""
    source = open_data(job.data, job.collate)
    model = ModelState(job, torch.device("cpu"), torch.float64).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        begin, total, weight = 4 * step, torch.zeros((), dtype=torch.float64), 0
        for size in micro_batch_sizes(4, job.accumulate):
            for _ in range(ranks):
                part = source.fetch(torch.arange(begin, begin + size // ranks))
                words = int((part[1] != -100).sum())
                total, weight = total + causal_loss(model, part) * words, weight + words
                begin += size // ranks
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
    return losses, {key: parameter.detach() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("plan", "ranks", "accumulate"),
    [("single", 1, 2), ("ddp", 2, 1), ("ddp", 2, 2), ("zero3", 2, 1), ("zero1", 2, 2), ("server-sync", 3, 1)],
)
def test_equal_to_a_plain_loop(plan: str, ranks: int, accumulate: int) -> None:
    job, chosen = job_with(accumulate), resolve(plan, ranks)
    losses, weights = plain(job, chosen.data_ranks)
    found = run_serially(job, chosen, STEPS, torch.float64)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    for key, weight in weights.items():  # float64; AdamW enlarges the rounding of other orders of sums
        assert torch.allclose(found.weights[key], weight, rtol=1e-8, atol=1e-10), key


def test_a_layer_that_is_first_used_in_the_middle_of_a_run() -> None:
    """None of the samples that are looked at beforehand is long: one rank takes it, several have begun without it."""
    data = [torch.arange(1, 9) if at % 60 != 37 else torch.arange(30) % WORDS for at in range(240)]
    job = replace(job_with(1), data=data, steps=10)
    assert len(run_serially(job, resolve("single", 1), 10, torch.float64).losses) == 10
    with pytest.raises(
        JobError, match=r"does not train the parameters that others do: extra\.bias, extra\.weight"
    ):
        run_serially(job, resolve("ddp", 2), 10, torch.float64)


class Across(ForLong):
    """Long batches use the layer at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        if x.shape[1] > 20:
            h = h + self.extra(h).tanh()
        out: Tensor = self.head(self.extra(self.second(self.first(h))).relu())
        return out


def test_stages_that_change_with_the_shape_are_refused() -> None:
    job = replace(job_with(2), model=Across)
    with pytest.raises(PlanError, match="extra.weight is used by the stages"):
        run_serially(job, resolve("gpipe", 2), STEPS, torch.float64)
