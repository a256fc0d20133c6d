"""Background loading: every sample once, the same ids under any ranks and after any resume, no thread left."""

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import DataError
from plait.job import LoadedStep, Loader, SampleOrder, open_data
from plait.job.data.damage import Damage
from plait.job.data.open import Source


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "plait-loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if loader_threads():
        gc.collect()
    deadline = time.monotonic() + 30
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader_threads() == []


def column(num_samples: int = 97) -> Source:
    return open_data(torch.arange(num_samples))


def stream(num_samples: int = 97) -> Source:
    return open_data(lambda: (torch.tensor(i) for i in range(num_samples)))


def load(source: Source, batch: int = 10, accumulate: int = 1, **options: Any) -> list[LoadedStep]:
    order = None
    if source.num_samples is not None:
        order = SampleOrder(num_samples=source.num_samples, batch=batch, accumulate=accumulate, seed=5)
    with Loader(source=source, order=order, batch=batch, accumulate=accumulate, **options) as loader:
        return list(loader)


SOURCES = pytest.mark.parametrize("make", [column, stream])


@SOURCES
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_complaint_15_97_samples_are_each_counted_once(make: Any, ranks: int, accumulate: int) -> None:
    loaded = [load(make(), accumulate=accumulate, rank=rank, ranks=ranks, epochs=2) for rank in range(ranks)]
    assert [len(steps) for steps in loaded] == [20] * ranks
    for epoch in (0, 1):
        values = [
            share.batch
            for steps in loaded
            for step in steps
            if step.epoch == epoch
            for share in step.micro_batches
        ]
        assert sorted(torch.cat(values).tolist()) == list(range(97))
    # All ranks have the same number of micro-batches in every step, so that nobody waits for one that never comes.
    for step in zip(*loaded, strict=True):
        assert len({len(part.micro_batches) for part in step}) == 1
        assert len({part.ends_epoch for part in step}) == 1


@SOURCES
def test_shares_say_where_they_are(make: Any) -> None:
    loaded = [load(make(), batch=11, accumulate=2, rank=rank, ranks=4, stop_step=1)[0] for rank in range(4)]
    whole = loaded[0].ids.tolist()
    assert len(whole) == 11
    for index, (begin, sizes) in enumerate([(0, (2, 2, 1, 1)), (6, (2, 1, 1, 1))]):
        for rank, step in enumerate(loaded):
            share = step.micro_batches[index]
            assert share.sizes == sizes
            assert share.global_offset == begin
            assert share.offset == sum(sizes[:rank])
            assert list(share.ids) == whole[begin + share.offset : begin + share.offset + sizes[rank]]
            assert share.batch.tolist() == list(share.ids)
    assert all(step.ids.tolist() == whole for step in loaded)


@SOURCES
def test_complaint_15_a_rank_without_samples_gets_a_batch_of_0_rows(make: Any) -> None:
    # 97 = 9 * 10 + 7: the last step has 7 samples for 8 ranks.
    last = load(make(), rank=7, ranks=8, epochs=1)[-1]
    (share,) = last.micro_batches
    assert share.sizes == (1, 1, 1, 1, 1, 1, 1, 0)
    assert share.ids == ()
    assert share.batch.shape == (0,)
    assert share.batch.dtype == torch.int64


@SOURCES
def test_fewer_samples_than_accumulate_makes_fewer_micro_batches(make: Any) -> None:
    steps = load(make(12), batch=10, accumulate=4, epochs=1)
    assert [len(step.micro_batches) for step in steps] == [4, 2]


@SOURCES
@pytest.mark.parametrize("start", [0, 1, 9, 10, 13])
def test_complaint_14_ids_after_a_resume_are_the_same_also_with_other_ranks(make: Any, start: int) -> None:
    uninterrupted = load(make(), accumulate=2, rank=0, ranks=2, stop_step=25)
    log = {step.step: (step.epoch, step.ends_epoch, step.ids.tolist()) for step in uninterrupted}
    assert list(log) == list(range(25))
    for ranks in (1, 3):
        parts = [
            load(make(), accumulate=2, rank=rank, ranks=ranks, start_step=start, stop_step=25)
            for rank in range(ranks)
        ]
        for steps in zip(*parts, strict=True):
            first = steps[0]
            assert (first.epoch, first.ends_epoch, first.ids.tolist()) == log[first.step]
            read = [
                i
                for index in range(len(first.micro_batches))
                for step in steps
                for i in step.micro_batches[index].ids
            ]
            assert read == log[first.step][2]
        assert [step.step for step in parts[0]] == list(range(start, 25))


def test_complaint_14_the_order_is_shuffled_anew_in_every_epoch() -> None:
    steps = load(column(), batch=97, epochs=3)
    assert len({tuple(step.ids.tolist()) for step in steps}) == 3
    assert [step.ends_epoch for step in steps] == [True] * 3


@SOURCES
@pytest.mark.parametrize("num_samples", [25, 30])
def test_the_last_step_of_an_epoch_is_marked(make: Any, num_samples: int) -> None:
    steps = load(make(num_samples), epochs=2)
    assert [step.ends_epoch for step in steps] == [False, False, True] * 2
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 1]


def test_a_stream_is_read_again_from_its_start_and_told_the_epoch() -> None:
    class Shuffled:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[float]:
            return iter([self.epoch + 0.0, self.epoch + 0.5])

    steps = load(open_data(Shuffled()), batch=2, epochs=2)
    assert [step.micro_batches[0].batch.tolist() for step in steps] == [[0.0, 0.5], [1.0, 1.5]]


def test_an_endless_stream_stops_at_the_last_step() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    steps = load(open_data(endless), batch=4, stop_step=3)
    assert [step.ids.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_an_empty_stream_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="0 samples in epoch 0"):
        load(open_data(lambda: iter([])), epochs=1)


class Broken:
    """Fails on one sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        if index == 6:
            raise ValueError("cannot decode")
        return torch.tensor(index)


def test_an_exception_comes_after_the_good_steps_and_names_samples_and_line() -> None:
    order = SampleOrder(num_samples=12, batch=4, shuffle=False)
    with Loader(source=open_data(Broken()), order=order, batch=4, rank=1, ranks=2, epochs=1) as loader:
        assert next(loader).step == 0
        with pytest.raises(
            DataError, match=r"step 2: .*: sample 6 is damaged, read at .*test_loader.py:\d+"
        ) as caught:
            next(loader)
        assert "ValueError: cannot decode" in caught.value.what
        assert caught.value.fix
        assert isinstance(caught.value.__cause__, DataError)
        assert isinstance(caught.value.__cause__.__cause__, ValueError)


def test_an_exception_in_a_stream_names_the_sample() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise OSError("connection lost")

    with pytest.raises(DataError, match=r"sample 5 of epoch 0 .*OSError: connection lost"):
        load(open_data(broken), batch=3, epochs=1)


def test_a_collate_failure_keeps_its_own_fix() -> None:
    ragged = open_data([torch.ones(n) for n in (1, 2, 3, 4, 5, 6)])
    with pytest.raises(DataError, match="step 1: loading samples") as caught:
        load(ragged, batch=3, epochs=1)
    assert caught.value.fix is not None
    assert "collate=" in caught.value.fix


class Counted:
    """Counts how many samples were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return torch.tensor(index)


@pytest.mark.parametrize("depth", [1, 3])
def test_it_reads_ahead_in_the_background_and_no_further_than_depth(depth: int) -> None:
    data = Counted()
    order = SampleOrder(num_samples=1000, batch=1)
    with Loader(source=open_data(data), order=order, batch=1, depth=depth):
        deadline = time.monotonic() + 30
        while data.asked < depth + 1 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        # `depth` are ready and one more waits to be put
        assert data.asked == depth + 1


def test_a_rank_reads_only_its_own_part() -> None:
    data = Counted()
    order = SampleOrder(num_samples=1000, batch=100)
    with Loader(source=open_data(data), order=order, batch=100, rank=0, ranks=4, epochs=1) as loader:
        list(loader)
    assert data.asked == 250


def test_close_ends_the_thread_whatever_it_does() -> None:
    order = SampleOrder(num_samples=97, batch=1)
    loader = Loader(source=column(), order=order, batch=1)
    next(loader)
    loader.close()
    assert loader_threads() == []
    assert list(loader) == []
    loader.close()
    never_started = Loader(source=column(), order=order, batch=1)
    never_started.close()
    assert list(never_started) == []


def test_close_does_not_wait_for_a_dataset_that_is_stuck() -> None:
    release = threading.Event()

    class Stuck(Counted):
        def __getitem__(self, index: int) -> Tensor:
            release.wait(30)
            return torch.tensor(index)

    loader = Loader(source=open_data(Stuck()), order=SampleOrder(num_samples=1000, batch=1), batch=1)
    loader.start()
    begin = time.monotonic()
    loader.close(timeout_s=0.1)
    assert time.monotonic() - begin < 20
    assert list(loader) == []
    release.set()


def test_a_loader_that_nobody_holds_any_more_ends_its_thread() -> None:
    loader = Loader(source=column(), order=SampleOrder(num_samples=97, batch=1), batch=1)
    next(loader)
    assert len(loader_threads()) == 1
    del loader  # the fixture sees that the thread ends


def test_the_damaged_sample_that_ends_a_run_is_not_told_as_left_out() -> None:
    damage = Damage(allowed=1)
    damage.take(3, OSError("torn"))
    with pytest.raises(DataError, match="2 samples are damaged, 1 are allowed"):
        damage.take(4, OSError("torn"))
    (line,) = damage.lines()
    assert "sample 3" in line and line.endswith("left out.")
