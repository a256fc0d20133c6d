"""A captured step that fails names the user's line, the module, the micro-batch and its samples."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.errors import StepError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks

BAD = 13
"""The sample that spoils its micro-batch."""


class Block(nn.Module):
    """Looks up words, and takes a logarithm on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        looked = self.table(words)  # the lookup
        masked = torch.where(scale > 0, (scale - scale) / scale, 0.0)
        logs = (scale + 1e-3).log()  # the logarithm
        return self.out(looked * (logs + masked)[:, None])


class Net(nn.Module):
    """A block inside a model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        return self.body(words, scale)


def line(comment: str) -> str:
    """file:line of a line of Block."""
    lines, first = inspect.getsourcelines(Block)
    return f"{__file__}:{first + next(i for i, text in enumerate(lines) if comment in text)}"


def samples(word: int = 1, scale: float = 1.0) -> list[Any]:
    """Harmless ones but for one; scales of 0 make NaN only in what is masked, which must not be blamed."""
    plain = [(torch.tensor(2), torch.tensor(float(index % 2)), torch.tensor(1)) for index in range(24)]
    spoiled = (torch.tensor(word), torch.tensor(scale), torch.tensor(1))
    return [*plain[:BAD], spoiled, *plain[BAD + 1 :]]


def run(data: list[Any], plan: str, ranks: int, detect_nan: bool = False, **settings: Any) -> None:
    job = Job(
        model=Net,
        data=data,
        objective=lambda model, batch: nn.functional.cross_entropy(model(*batch[:2]), batch[2]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=24,
        accumulate=2,
        steps=1,
    )
    programs = prepare(job, resolve(plan, ranks, settings), "cpu", torch.float32, lambda event: None)
    assert programs.capture_error is None
    all_ranks = SerialRanks(job, programs, torch.float32)
    for machine in all_ranks.machines:
        machine.segments.detect_nan = detect_nan
    all_ranks.run(0)


@pytest.mark.parametrize(
    ("plan", "ranks", "settings"),
    [("single", 1, {}), ("ddp", 2, {}), ("zero3", 2, {}), ("gpipe", 2, {}), ("single", 1, {"compile": "on"})],
)
def test_an_index_out_of_range_names_line_module_and_samples(
    plan: str, ranks: int, settings: dict[str, Any]
) -> None:
    with pytest.raises(StepError) as caught:
        run(samples(word=11), plan, ranks, **settings)
    error, text = caught.value, str(caught.value)
    assert error.where == line("# the lookup") and error.where in text
    assert error.module == "body.table" and "in module body.table" in text
    assert "looked = self.table(words)" in text and "embedding" in text
    assert BAD in error.ids and len(error.ids) == 12 // (ranks if plan != "gpipe" else 1)
    assert "(step 1, rank " in text and f"micro-batch {error.micro_batch}, samples {error.ids[0]}, " in text
    assert "Fix: " in text and "<plait segment" not in text
    assert error.__cause__ is not None


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("ddp", 2)])
def test_nan_names_the_line_that_made_it(plan: str, ranks: int) -> None:
    with pytest.raises(StepError) as caught:
        run(samples(scale=-2.0), plan, ranks, detect_nan=True)
    error, text = caught.value, str(caught.value)
    assert error.where == line("# the logarithm") and error.module == "body"
    assert "log" in text and "made NaN of numbers" in text and BAD in error.ids


def test_nan_is_not_looked_for_unless_asked() -> None:
    run(samples(scale=-2.0), "single", 1)


def test_numbers_are_not_blamed() -> None:
    run(samples(), "ddp", 2, detect_nan=True)


def test_nan_in_the_data_is_said_to_come_from_there() -> None:
    with pytest.raises(StepError, match="NaN came in with tensor 1 of the batch") as caught:
        run(samples(scale=float("nan")), "single", 1, detect_nan=True)
    assert BAD in caught.value.ids and caught.value.where is None


class Reads(nn.Module):
    """Cannot be captured: its code goes by values."""

    def __init__(self, island: bool) -> None:
        super().__init__()
        self.table, self.out, self.body = nn.Embedding(11, 4), nn.Linear(4, 3), Picky(4 if island else 400)

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        return self.out(self.body(self.table(words % 11), words, scale))


class Picky(nn.Module):
    """The part that reads them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, looked: Tensor, words: Tensor, scale: Tensor) -> Tensor:
        for index in words.nonzero().flatten().tolist():
            if words[index] == 99:
                raise ValueError("no such word")  # the word
        ignored = (scale * 0).log() * 0  # NaN that nobody uses
        logs = (scale + 1e-3).log()  # the logarithm
        return looked * torch.where(scale > 9, ignored, logs)[:, None] * self.weight[:4]


@pytest.mark.parametrize(
    ("plan", "ranks", "island"), [("single", 1, False), ("ddp", 2, False), ("zero3", 2, True)]
)
@pytest.mark.parametrize("nan", [False, True])
def test_code_that_runs_eagerly_is_named_too(plan: str, ranks: int, island: bool, nan: bool) -> None:
    job = Job(
        model=lambda: Reads(island),
        data=samples(scale=-1.0) if nan else samples(word=99),
        objective=lambda model, batch: nn.functional.cross_entropy(model(*batch[:2]), batch[2]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=24,
        accumulate=2,
        steps=1,
        shuffle=False,
    )
    programs = prepare(job, resolve(plan, ranks), "cpu", torch.float32, lambda event: None)
    assert (programs.capture_error is None) == island
    all_ranks = SerialRanks(job, programs, torch.float32)
    for machine in all_ranks.machines:
        machine.segments.detect_nan = nan
    with pytest.raises(StepError) as caught:
        all_ranks.run(0)
    error, (lines, first) = caught.value, inspect.getsourcelines(Picky)
    number = next(i for i, text in enumerate(lines) if ("the logarithm" if nan else "the word") in text)
    assert error.where == f"{__file__}:{first + number}" and error.module == "body"
    assert error.micro_batch == 1 and BAD in error.ids and error.step == 0
    assert ("log made NaN of numbers" if nan else "ValueError: no such word") in str(error)


class Words(nn.Module):
    """Tables of words and of classes, which `megatron` cuts by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = (
            nn.Embedding(20, 8),
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
        )
        self.out = nn.Linear(8, 12)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.hidden(self.table(words).mean(1)))


@pytest.mark.parametrize(("word", "label"), [(20, 0), (-1, 0), (0, 12), (0, -1), (19, 11), (0, -100)])
@pytest.mark.parametrize("plan", ["single", "megatron"])
def test_an_index_that_no_rank_has_is_an_error_as_on_one_rank(plan: str, word: int, label: int) -> None:
    """Each rank finds what it has of a table; what none has would count as nothing."""
    words, labels = torch.zeros(8, 3, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    words[5, 1], labels[5] = word, label
    job = Job(
        model=Words, data=(words, labels), loss=nn.CrossEntropyLoss(), batch=8, steps=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    chosen = resolve(plan, 1 if plan == "single" else 2, {})
    programs = prepare(job, chosen, "cpu", torch.float32, lambda event: None)
    if plan == "megatron":
        ops = str(
            [
                node.target
                for own in programs.full_step().classes
                for s in own.segments.values()
                for node in s.nodes
            ]
        )
        assert "own_rows" in ops and "own_losses" in ops
    ranks = SerialRanks(job, programs, torch.float32)
    if 0 <= word < 20 and (0 <= label < 12 or label == -100):
        assert ranks.run(0)
        return
    with pytest.raises(StepError, match="out of (range|bounds)") as caught:
        ranks.run(0)
    assert caught.value.micro_batch == 0 and 5 in caught.value.ids
    assert "0x" not in str(caught.value), "names of ops, not of objects"
