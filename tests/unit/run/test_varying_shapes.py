"""Batches whose shapes vary: one program for all of them, equal to a plain loop that is padded the same way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.errors import JobError, PlanError
from plait.graph.capture.capture import capture
from plait.graph.from_job import Captures
from plait.graph.graph import Graph, without_gradients
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.job.order import micro_batch_sizes, shares
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.rewrite.rewrite import Rewritten
from plait.run.hold.state import ModelState
from plait.run.prepare.prepare import prepare
from plait.run.proof.reference import reference_of
from plait.run.proof.serial_run import SerialRanks, run_serially
from plait.run.verify import verify

WORDS, WIDTH, STEPS = 17, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, 2, width // 2).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class CausalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.first, self.second, self.head = Block(), Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.second(self.first(self.words(x) + places)))
        return out


class MaskedModel(nn.Module):
    """Like BERT: attends to all that is no padding, with a token of its own in front."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.front = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        rows = x.shape[0]
        x = torch.cat([self.front.expand(rows, 1, WIDTH), self.words(x)], dim=1)
        real = torch.cat([real.new_ones(rows, 1), real], dim=1)
        out: Tensor = self.head(self.block(x, real[:, None, None, :])[:, 0])
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, WIDTH), self.layer(), nn.Linear(6, 1)

    def layer(self) -> nn.RNNBase:
        return nn.LSTM(WIDTH, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.words(x))[0])
        return out.squeeze(-1)


class Gated(Recurrent):
    def layer(self) -> nn.RNNBase:
        return nn.GRU(WIDTH, 3, batch_first=True, bidirectional=True, num_layers=2, dropout=0.0)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Conv2d(3, 4, 3, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))
        return out


def _padded(samples: Sequence[Tensor], value: int) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True, padding_value=value)


def next_words(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _padded([s[:-1] for s in samples], 0), _padded([s[1:] for s in samples], -100)


def masked(samples: list[Tensor]) -> dict[str, Tensor]:
    x = _padded(samples, 0)
    real = torch.arange(x.shape[1]) < torch.tensor([len(s) for s in samples])[:, None]
    return {"x": x, "real": real, "y": torch.stack([s[0] % 3 for s in samples])}


def numbers(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    x = _padded(samples, 0)
    return x, torch.sin(x.double()).float()


def pictures(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Padded to the largest height and width."""
    high, wide = (max(s.shape[dim] for s in samples) for dim in (0, 1))
    x = torch.stack([F.pad(s, (0, wide - s.shape[1], 0, high - s.shape[0])) for s in samples])
    return x[:, None], torch.tensor([int(s.numel() % 3) for s in samples])


def sentences(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 30, (count,), generator=generator).tolist()
    return [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]


def photographs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(9, 21, (count, 2), generator=generator).tolist()
    return [torch.randn(high, wide, generator=generator) for high, wide in sizes]


def causal_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["real"]), batch["y"])


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1].to(next(model.parameters()).dtype))


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].to(next(model.parameters()).dtype)), batch[1])


@dataclass(frozen=True, kw_only=True)
class Ragged:
    model: Callable[[], nn.Module]
    objective: Callable[..., Tensor]
    collate: Callable[[list[Tensor]], Any]
    weight: Callable[[Any], int]
    """Of a batch: of what the loss is a mean."""
    data: Callable[[int], list[Tensor]] = sentences


CASES = {
    "causal": Ragged(
        model=CausalModel, objective=causal_loss, collate=next_words, weight=lambda b: int((b[1] != -100).sum())
    ),
    "masked": Ragged(model=MaskedModel, objective=masked_loss, collate=masked, weight=lambda b: len(b["y"])),
    "recurrent": Ragged(model=Recurrent, objective=squared, collate=numbers, weight=lambda b: b[1].numel()),
    "gated": Ragged(
        model=Gated, objective=squared, collate=numbers, weight=lambda b: b[1].numel()
    ),
    "pictures": Ragged(
        model=Pictures, objective=class_loss, collate=pictures, weight=lambda b: len(b[1]), data=photographs
    ),
}  # fmt: skip


def job_of(name: str, *, batch: int = 6, accumulate: int = 1, count: int = 32) -> Job:
    case = CASES[name]
    return Job(
        model=case.model,
        data=case.data(count),
        collate=case.collate,
        objective=case.objective,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=batch,
        accumulate=accumulate,
        steps=STEPS,
    )


@cache
def captures_of(name: str, batch: int, accumulate: int) -> Captures:
    return Captures(job_of(name, batch=batch, accumulate=accumulate), None, torch.float64)


@cache
def plain(name: str, batch: int, accumulate: int, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of a plain loop in which every rank's share of every micro-batch is padded by itself."""
    job, case = job_of(name, batch=batch, accumulate=accumulate), CASES[name]
    source = open_data(job.data, job.collate)
    order = job.order(source.num_samples)
    assert order is not None
    model = ModelState(job, torch.device("cpu"), torch.float64).model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        ids, begin, total, weight = order.at(step).ids, 0, torch.zeros((), dtype=torch.float64), 0
        for size in micro_batch_sizes(len(ids), accumulate):
            for count in shares(size, ranks):
                part = source.fetch(ids[begin : begin + count])
                total = total + case.objective(model, part) * case.weight(part)
                weight, begin = weight + case.weight(part), begin + count
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        losses.append((total / weight).item())
    return losses, {key: parameter.detach() for key, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "plan", "ranks", "batch", "accumulate"),
    [
        ("causal", "single", 1, 6, 1),
        ("causal", "single", 1, 6, 3),
        ("causal", "ddp", 2, 6, 1),
        ("causal", "ddp", 3, 7, 1),
        ("causal", "zero3", 2, 6, 1),
        ("causal", "1f1b", 2, 6, 3),
        ("causal", "megatron", 2, 6, 1),
        ("masked", "ddp", 2, 6, 1),
        ("masked", "zero1", 3, 6, 2),
        ("recurrent", "single", 1, 6, 2),
        ("recurrent", "ddp", 2, 6, 2),
        ("recurrent", "zero2", 2, 7, 1),
        ("recurrent", "gpipe", 2, 6, 3),
        ("gated", "ddp", 2, 6, 2),
        ("gated", "1f1b", 2, 6, 3),
        ("pictures", "single", 1, 6, 1),
        ("pictures", "ddp", 2, 6, 1),
    ],
)
def test_equal_to_a_plain_loop(name: str, plan: str, ranks: int, batch: int, accumulate: int) -> None:
    chosen = resolve(plan, ranks)
    job = job_of(name, batch=batch, accumulate=accumulate)
    found = run_serially(job, chosen, STEPS, torch.float64, captures=captures_of(name, batch, accumulate))
    losses, weights = plain(name, batch, accumulate, chosen.data_ranks)
    assert found.losses == pytest.approx(losses, rel=1e-12)
    for key, weight in weights.items():
        assert torch.allclose(found.weights[key], weight, rtol=1e-8, atol=1e-10), key


@pytest.mark.parametrize("name", ["causal", "recurrent", "gated", "pictures"])
def test_a_few_captures_serve_all_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> Graph:
        calls.append(1)
        return capture(*args)

    monkeypatch.setattr("plait.graph.from_job.capture", counted)
    job = replace(job_of(name, count=120), steps=20)
    programs = prepare(job, resolve("single", 1), "cpu", torch.float32, lambda event: None)
    before = len(calls)
    ranks = SerialRanks(job, programs, torch.float32)
    used = set()
    for step in range(20):
        assert ranks.run(step)
        used |= {id(ranks.machines[0]._at.program)}
    assert len(used) <= 2, "a record may stretch the program once"
    assert len(calls) - before <= 2, (before, len(calls))
    assert before <= (5 if name != "pictures" else 24), "one size is learned from a few"
    assert not programs.news()


class OddOnes(nn.Module):
    """Adds a layer where the length is odd: no function of the size says so."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.extra = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WORDS),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        if x.shape[1] % 2:
            h = self.extra(h).relu()
        out: Tensor = self.head(h + 0 * self.extra(h))
        return out


def test_what_no_function_describes_is_compiled_for_each_shape_and_told() -> None:
    job = replace(job_of("causal", batch=2), model=OddOnes, steps=12)
    programs = prepare(job, resolve("single", 1), "cpu", torch.float64, lambda event: None)
    ranks = SerialRanks(job, programs, torch.float64)
    told = []
    for step in range(12):
        assert ranks.run(step)
        told += programs.news()
    assert len(told) == 1 and "captured and compiled anew" in told[0] and "Fix:" in told[0]
    (key,) = programs._varying
    varying = programs._varying.get(key)
    assert varying is not None and len(varying._single) <= 8
    single = run_serially(replace(job, steps=STEPS), resolve("single", 1), STEPS, torch.float64)
    source, order = open_data(job.data, job.collate), job.order(32)
    assert order is not None
    model = ModelState(job, torch.device("cpu"), torch.float64).model
    first = causal_loss(model, source.fetch(order.at(0).ids))
    assert single.losses[0] == pytest.approx(first.item(), rel=1e-12)


def test_rewriting_that_depends_on_lengths_is_left_for_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def pays_for_long_ones(graph: Graph, plan: Plan, *_: Any) -> Rewritten | None:
        length = graph.nodes()[graph.inputs_of("batch")[0].node].meta["val"].shape[1]
        if plan.rewrite == "off" or length < 20:
            return None
        other = without_gradients(graph, frozenset({"head.bias"}))
        return Rewritten(graph=other, before=0, before_s=0.0, after_s=0.0, took_s=0.0)

    monkeypatch.setattr("plait.run.prepare.step_compiler.rewrite_where_it_pays", pays_for_long_ones)
    job = job_of("causal", count=60)
    programs = prepare(job, resolve("single", 1), "cpu", torch.float32, lambda event: None)
    ranks = SerialRanks(job, programs, torch.float32)
    assert all(ranks.run(step) for step in range(STEPS))
    assert not programs.news()
    assert "head.bias" in programs.trained
    assert programs.choices[0].startswith("not rewritten")


class Dropped(nn.Module):
    """Its norm takes the smallest number of a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.RMSNorm(WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.words(x), 0.2)
        out: Tensor = self.head(self.norm(h + 0.1 * torch.rand_like(h)))
        return out


def test_verify_draws_the_same_numbers_for_every_length() -> None:
    known = reference_of(replace(job_of("causal", accumulate=2), model=Dropped), steps=2)
    assert known.eager_notice is None
    assert not isinstance(known.eager, str) and all(difference.ok for difference in known.eager)


def test_verify_accepts_shares_of_different_lengths() -> None:
    known = reference_of(job_of("causal", accumulate=3), captures=captures_of("causal", 6, 3))
    found = verify(known.job, "ddp", 2, serial=True, against=known)
    assert found.ok, found.first


def test_a_mean_over_elements_that_varies_late_is_refused_where_shares_cannot_be_weighed() -> None:
    data = [torch.arange(1, 9)] * 64
    for place in (13, 14):
        data[place] = torch.arange(1, 12)
    job = replace(job_of("recurrent"), data=data, shuffle=False)
    with pytest.raises(JobError, match="cannot be weighed"):
        run_serially(job, resolve("ddp", 2), 3, torch.float64)
    losses = run_serially(job, resolve("single", 1), 3, torch.float64).losses
    assert len(losses) == 3


class Normed(Pictures):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))
        return out


def test_ranks_that_compute_together_are_padded_alike() -> None:
    job = replace(job_of("pictures"), model=Normed)
    graphs = Captures(job, None, torch.float64)
    one, two = (
        run_serially(job, resolve(plan, n), 2, torch.float64, captures=graphs)
        for plan, n in (("single", 1), ("ddp", 2))
    )
    assert one.losses == pytest.approx(two.losses, rel=1e-11)
    for name, buffer in one.buffers.items():
        assert torch.allclose(buffer.double(), two.buffers[name].double(), rtol=1e-9), name


@pytest.mark.parametrize(("plan", "ranks"), [("ddp", 3), ("zero2", 2)])
def test_the_last_sample_of_an_epoch_alone_in_its_micro_batch(plan: str, ranks: int) -> None:
    """Its only row is no dim that can be cut: whoever has none of it must see its length all the same."""
    job = replace(job_of("causal", accumulate=2, count=9), steps=2)  # the last step: 3 samples, 2 and 1
    found = run_serially(job, resolve(plan, ranks), 2, torch.float64)
    one = run_serially(job, resolve("single", 1), 2, torch.float64)
    assert found.losses == pytest.approx(one.losses, rel=1e-12)
    for key, weight in one.weights.items():
        assert torch.allclose(found.weights[key], weight, rtol=1e-8, atol=1e-10), key


def test_lengths_of_one_among_others_are_told_with_the_reason() -> None:
    lengths = [2, 9, 2, 12, 2, 7, 2, 11, 10, 2, 5, 2]  # the first of each is its input
    data = [torch.arange(1, n + 1) for n in lengths]
    job = replace(job_of("causal", batch=2, accumulate=2), data=data, shuffle=False, steps=6)
    programs = prepare(job, resolve("single", 1), "cpu", torch.float64, lambda event: None)
    ranks, told = SerialRanks(job, programs, torch.float64), []
    for step in range(6):
        assert ranks.run(step)
        told += programs.news()
    assert len(told) == 1 and "a dim of extent 1" in told[0]


def test_a_length_that_does_not_divide_is_told_with_the_padding_that_helps() -> None:
    lengths = [10] * 18 + [9] * 18  # eight words, then seven
    job = replace(job_of("causal"), data=[torch.arange(1, n) for n in lengths], shuffle=False)
    with pytest.raises(PlanError, match="does not divide by domain=2") as told:
        run_serially(job, resolve("domain", 2), 4, torch.float64)
    assert "pad to a multiple of 2" in str(told.value.fix)


def test_samples_grouped_by_length_train_alike_on_any_number_of_ranks() -> None:
    plain = job_of("causal")
    grouped = replace(plain, lengths=[len(sample) for sample in plain.data])
    graphs = Captures(grouped, None, torch.float64)
    one, two = (
        run_serially(grouped, resolve(plan, n), 3, torch.float64, captures=graphs)
        for plan, n in (("single", 1), ("ddp", 2))
    )
    assert one.losses == pytest.approx(two.losses, rel=1e-12)
    with pytest.raises(JobError, match="lengths has 5 entries for 32 samples"):
        run_serially(replace(plain, lengths=[1] * 5), resolve("single", 1), 1, torch.float64)
    with pytest.raises(JobError, match="shuffle=False"):
        replace(plain, lengths=[1] * 32, shuffle=False)


def test_a_size_that_comes_for_the_first_time_is_new_to_a_program_that_is_not() -> None:
    """On a GPU other sizes may mean other kernels."""
    job = job_of("causal", count=60)
    programs = prepare(job, resolve("single", 1), "cpu", torch.float32, lambda event: None)
    ranks = SerialRanks(job, programs, torch.float32)
    met: dict[tuple[int, ...], bool] = {}
    for step in range(STEPS):
        assert ranks.run(step)
        now = ranks.machines[0]._at
        assert now.own.sized is not None
        sizes = tuple(now.shares[0].batch[0].shape)
        assert now.is_new == (sizes not in met)
        met[sizes] = True
    assert len(met) > 1
