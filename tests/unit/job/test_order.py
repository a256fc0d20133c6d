"""The sample order: from the seed and the step alone, every sample once an epoch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError, JobError
from plait.job import SampleOrder, micro_batch_sizes, shares, split


@given(st.integers(0, 500), st.integers(1, 40))
def test_split_is_array_split(size: int, parts: int) -> None:
    assert list(split(size, parts)) == [len(part) for part in np.array_split(np.arange(size), parts)]


def test_micro_batches_and_shares() -> None:
    assert split(5, 2) == (3, 2)
    assert micro_batch_sizes(10, 4) == (3, 3, 2, 2)
    assert micro_batch_sizes(2, 4) == (1, 1)
    assert micro_batch_sizes(0, 4) == ()
    assert shares(2, 4) == (1, 1, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 2**63 - 1), st.integers(0, 3))
def test_every_epoch_holds_every_sample_once(num_samples: int, batch: int, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples=num_samples, batch=batch, seed=seed)
    per_epoch = order.num_batches_per_epoch
    steps = [order.at(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
    assert {step.epoch for step in steps} == {epoch}
    assert sorted(torch.cat([step.ids for step in steps]).tolist()) == list(range(num_samples))
    assert all(len(step.ids) == batch for step in steps[:-1])


def test_the_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    def ids(step: int, seed: int, accumulate: int = 1) -> list[int]:
        order = SampleOrder(num_samples=50, batch=50, seed=seed, accumulate=accumulate)
        return order.at(step).ids.tolist()

    torch.manual_seed(1)
    first = ids(0, seed=0)
    torch.manual_seed(2)
    assert ids(0, seed=0) == first
    assert ids(0, seed=0, accumulate=7) == first
    # No epoch repeats, and epoch e of seed s is not epoch e-1 of seed s+1.
    assert len({tuple(ids(epoch, seed)) for epoch in range(5) for seed in range(5)}) == 25


def test_without_shuffle_the_order_is_the_stored_one() -> None:
    order = SampleOrder(num_samples=5, batch=2, shuffle=False)
    assert [order.at(step).ids.tolist() for step in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert order.at(3).epoch == 1
    assert order.at(0).ids.dtype == torch.int64


def test_jumping_between_epochs_gives_the_same_as_walking() -> None:
    walked = SampleOrder(num_samples=10, batch=4)
    expected = [walked.at(step).ids.tolist() for step in range(9)]
    jumping = SampleOrder(num_samples=10, batch=4)
    for step in (8, 0, 5, 2, 7):
        assert jumping.at(step).ids.tolist() == expected[step]


def test_a_step_is_found_without_walking_and_without_a_new_permutation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[int] = []
    draw = torch.randperm

    def counted(count: int, **options: Any) -> torch.Tensor:
        drawn.append(count)
        return draw(count, **options)

    monkeypatch.setattr(torch, "randperm", counted)
    order = SampleOrder(num_samples=6_400_000, batch=64)
    for offset in range(1000):
        order.at(10**9 + offset % 100)
    assert len(drawn) == 1


def test_what_cannot_be_ordered_is_refused() -> None:
    with pytest.raises(DataError, match="0 samples"):
        SampleOrder(num_samples=0, batch=1)
    with pytest.raises(JobError, match="batch=2, accumulate=3"):
        SampleOrder(num_samples=4, batch=2, accumulate=3)
    with pytest.raises(IndexError):
        SampleOrder(num_samples=4, batch=2).at(-1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 900), st.integers(1, 16), st.integers(0, 99), st.integers(0, 2))
def test_grouped_by_length_every_epoch_holds_every_sample_once(
    num_samples: int, batch: int, seed: int, epoch: int
) -> None:
    lengths = tuple((index * 7919) % 101 for index in range(num_samples))
    order = SampleOrder(num_samples=num_samples, batch=batch, seed=seed, lengths=lengths)
    ids = order.epoch_ids(epoch)
    assert sorted(ids.tolist()) == list(range(num_samples))
    assert torch.equal(
        ids, SampleOrder(num_samples=num_samples, batch=batch, seed=seed, lengths=lengths).epoch_ids(epoch)
    )


def test_grouped_by_length_pads_little_and_stays_random() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(1, 500, (4000,), generator=generator).tolist())

    def steps(order: SampleOrder) -> list[list[int]]:
        return [
            [lengths[i] for i in order.at(step).ids.tolist()] for step in range(order.num_batches_per_epoch)
        ]

    plain, grouped = (SampleOrder(num_samples=4000, batch=16, lengths=given) for given in (None, lengths))
    padded = [
        sum(max(step) * len(step) for step in steps(order)) / sum(lengths) for order in (plain, grouped)
    ]
    assert padded[0] > 1.7 and padded[1] < 1.05
    means = torch.tensor([sum(step) / len(step) for step in steps(grouped)])
    first, second = means[:-1], means[1:]
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.2, (
        "long and short steps alternate"
    )
    assert not torch.equal(grouped.epoch_ids(0), grouped.epoch_ids(1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 5), st.integers(0, 99))
def test_balanced_by_work_every_step_has_the_samples_that_it_had(
    num_samples: int, batch: int, accumulate: int, seed: int
) -> None:
    work = tuple((index * 7919) % 101 for index in range(num_samples))
    common: dict[str, Any] = {
        "num_samples": num_samples,
        "batch": batch,
        "seed": seed,
        "accumulate": min(accumulate, batch),
    }
    plain, orderly = (SampleOrder(**common, work=known) for known in (None, work))
    for step in range(plain.num_batches_per_epoch):
        before, after = (order.at(step).ids.tolist() for order in (plain, orderly))
        for size in micro_batch_sizes(len(before), common["accumulate"]):
            assert sorted(before[:size]) == sorted(after[:size])
            before, after = before[size:], after[size:]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_shares_have_about_the_same_work(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    work = tuple((torch.rand(640, generator=generator) ** 3 * 200).long().tolist())
    worst = []
    for known in (None, work):
        order = SampleOrder(num_samples=640, batch=64, work=known)
        sums = [
            [sum(work[each] for each in share) for share in order.of_shares(step, ranks)]
            for step in range(order.num_batches_per_epoch)
        ]
        worst.append(max(max(one) / (sum(one) / ranks) for one in sums))
    assert worst[0] > 1.2 and worst[1] < (1.2 if ranks == 3 else 1.05)


def test_data_that_fills_no_step_has_steps_of_one_size() -> None:
    assert SampleOrder(num_samples=5, batch=8).step_sizes == (5,)
    assert SampleOrder(num_samples=13, batch=8).step_sizes == (8, 5)
