"""Data read by processes: the same batches, in order; nothing left behind; damaged samples named or left out."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.errors import DataError
from plait.job import LoadedStep, Loader, SampleOrder, open_data
from plait.job.batch import Objects
from plait.job.data.source import Stream
from plait.job.data.workers import Pool
from plait.job.order import Draws


class Words(Dataset[Any]):
    """A sample of everything that a batch may hold."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand(2) + random.random() + float(np.random.rand())
        return {"x": torch.full((3,), float(index)), "drawn": drawn, "word": f"w{index}", "raw": np.arange(2)}


class Torn(Dataset[Any]):
    """Some files cannot be read."""

    def __init__(self, folder: Path, torn: tuple[int, ...], many: bool = False) -> None:
        self.files = [folder / f"{index}.txt" for index in range(12)]
        for index, file in enumerate(self.files):
            file.write_text("x" if index in torn else str(index))
        if many:
            self.__getitems__ = lambda ids: [self[index] for index in ids]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path = self.files[index]
        return torch.tensor(int(path.read_text()))


def load(
    data: Any, *, seed: int = 0, skip_bad: int = 0, collate: Any = None, **options: Any
) -> list[LoadedStep]:
    source = open_data(data, collate, skip_bad=skip_bad)
    order = SampleOrder(num_samples=source.num_samples or 0, batch=5, accumulate=2, seed=seed)
    with Loader(source=source, order=order, batch=5, accumulate=2, epochs=2, **options) as loader:
        found = list(loader)
        print(*(source.damage.lines() if source.damage is not None else ()), sep="\n")
    return found


def by_sample(steps: list[LoadedStep]) -> dict[tuple[int, int], list[float]]:
    return {
        (step.epoch, index): row.tolist()
        for step in steps
        for share in step.micro_batches
        for index, row in zip(share.ids, share.batch["drawn"], strict=True)
    }


def test_workers_give_what_a_thread_does_in_its_order() -> None:
    alone, worked = load(Words()), load(Words(), workers=2)
    assert [step.ids.tolist() for step in alone] == [step.ids.tolist() for step in worked]
    for one, other in zip(alone, worked, strict=True):
        for a, b in zip(one.micro_batches, other.micro_batches, strict=True):
            assert (a.ids, a.sizes, a.offset, a.global_offset) == (b.ids, b.sizes, b.offset, b.global_offset)
            assert torch.equal(a.batch["x"], b.batch["x"]) and torch.equal(a.batch["raw"], b.batch["raw"])
            assert a.batch["word"] == b.batch["word"] == [f"w{index}" for index in b.ids]
            assert isinstance(b.batch["word"], Objects)
            b.batch["x"].add_(1)  # memory of its own


def test_what_workers_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    one = by_sample(load(Words(), workers=1))
    cut = [by_sample(load(Words(), workers=3, rank=rank, ranks=2)) for rank in range(2)]
    assert one == cut[0] | cut[1]
    assert one[0, 4] != one[1, 4]
    assert one != by_sample(load(Words(), workers=1, seed=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_sample_is_named_with_its_file(tmp_path: Path, workers: int) -> None:
    with pytest.raises(DataError, match=r"sample 7 \(file .*/7\.txt\) is damaged.*ValueError.*") as caught:
        load(Torn(tmp_path, (7,)), workers=workers)
    assert "--skip-bad" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("many", [False, True])
def test_some_damaged_samples_may_be_left_out_alike_on_any_ranks(
    tmp_path: Path, workers: int, many: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Torn(tmp_path, (7, 8, 11), many)
    whole = load(data, skip_bad=3, workers=workers)
    told = capsys.readouterr().out
    assert all(told.count(f"sample {index} (file") == 1 for index in (7, 8, 11))
    values = [int(value) for step in whole[:3] for share in step.micro_batches for value in share.batch]
    stands_for = {7: 9, 8: 9, 11: 0}
    assert values == [stands_for.get(index, index) for step in whole[:3] for index in step.ids.tolist()]
    parts = [load(data, skip_bad=3, workers=workers, rank=rank, ranks=2) for rank in range(2)]
    for step, pair in zip(whole, zip(*parts, strict=True), strict=True):
        for at, share in enumerate(step.micro_batches):
            assert torch.equal(share.batch, torch.cat([one.micro_batches[at].batch for one in pair]))
    with pytest.raises(DataError, match="3 samples are damaged, 2 are allowed"):
        load(data, skip_bad=2, workers=workers)


class Counting:
    """An iterator that goes on after what fails."""

    def __init__(self, bad: tuple[int, ...] = (), at: int = 0) -> None:
        self.bad, self.at = bad, at

    def __iter__(self) -> Any:
        return Counting(self.bad, self.at)

    def __next__(self) -> Tensor:
        self.at += 1
        if self.at > 20:
            raise StopIteration
        if self.at - 1 in self.bad:
            raise ValueError("torn")
        return torch.tensor(self.at - 1)


def walk(source: Any, **options: Any) -> list[int]:
    with Loader(source=source, order=None, batch=5, epochs=1, **options) as loader:
        return [int(value) for step in loader for share in step.micro_batches for value in share.batch]


def test_streams_leave_out_what_is_damaged_and_say_when_they_end_with_it() -> None:
    with pytest.raises(DataError, match="sample 3 of epoch 0 of the stream is damaged"):
        walk(open_data(lambda: Counting((3, 4))))
    assert walk(open_data(lambda: Counting((3, 4)), skip_bad=2)) == [0, 1, 2, *range(5, 20)]

    def generate() -> Any:
        yield torch.tensor(0)
        raise ValueError("torn")

    with pytest.raises(DataError, match="the stream ended with it"):
        walk(open_data(generate, skip_bad=2))


def test_a_stream_that_can_skip_is_entered_where_a_run_resumes() -> None:
    torn = Stream(lambda epoch: Counting((2,)), None, lambda first: Counting((2,), first))
    assert walk(torn, start_step=2) == list(range(10, 20))  # reading from its start would raise
    whole = Stream(lambda epoch: Counting(), None, lambda first: Counting(at=first))
    with Loader(source=whole, order=None, batch=5, epochs=2, start_step=5, stop_step=6) as loader:
        (step,) = loader
    assert (step.epoch, step.ids.tolist()) == (1, [5, 6, 7, 8, 9])  # past the first epoch: walked


@pytest.mark.parametrize("start", [0, 4, 5])
def test_steps_that_share_batches_are_alike_in_streams_and_in_an_order(start: int) -> None:
    """Two epochs of four batches, three of which are drawn in a round of five steps."""
    draws = Draws(own=(True, True, False, True, False))
    batches = [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7]
    source = Stream(lambda epoch: Counting(), None, lambda first: Counting(at=first))
    order = SampleOrder(num_samples=20, batch=5, shuffle=False, draws=draws)
    given = {"batch": 5, "epochs": 2, "start_step": start, "draws": draws}
    for options in (
        {"source": source, "order": None},
        {"source": open_data(torch.arange(20)), "order": order},
    ):
        with Loader(**given | options) as loader:  # type: ignore[arg-type]
            found = [(loaded.step, loaded.epoch, loaded.ids.tolist(), loaded.ends_epoch) for loaded in loader]
        assert found == [
            (step, number // 4, list(range(number % 4 * 5, number % 4 * 5 + 5)), step in (5, 12))
            for step, number in enumerate(batches)
            if step >= start
        ]


def test_streams_of_hugging_face_are_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=2)
    source = open_data(made)
    assert isinstance(source, Stream) and source.seek is not None
    with Loader(source=source, order=None, batch=5, epochs=1, start_step=3) as loader:
        (step,) = loader
    assert step.micro_batches[0].batch["x"].tolist() == [15, 16, 17, 18, 19]


def test_a_worker_that_dies_is_told() -> None:
    class Fatal(Words):
        def __getitem__(self, index: int) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match=r"data worker with process id \d+ died of signal 9"):
        load(Fatal(), workers=2)


def test_nothing_is_left_when_a_loader_is_closed_in_the_middle() -> None:
    class Slow(Words):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60)

    source = open_data(Slow())
    order = SampleOrder(num_samples=23, batch=5)
    loader = Loader(source=source, order=order, batch=5, epochs=1, workers=2)
    loader.start()
    pids = [worker.pid for worker in loader._pool[0]._workers]
    loader.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_die_with_a_parent_that_is_killed() -> None:
    code = (
        "import time, os, signal\n"
        "from plait.job.data.workers import Pool\n"
        "pool = Pool(time.sleep, 2)\n"
        "print(*[worker.pid for worker in pool._workers], flush=True)\n"
        "for _ in zip(range(1), pool.ordered([600, 600, 600], 1)): pass\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(text) for text in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_answers_hold_any_size_and_any_tensor() -> None:
    def make(what: int) -> Any:
        odd = torch.arange(12.0).view(3, 4).t()
        shared = torch.ones(2)
        kinds = [
            torch.zeros(0, 3),
            torch.tensor(True),
            torch.ones(2, dtype=torch.bfloat16),
            odd,
            shared,
            shared,
        ]
        return kinds, "x" * what, np.arange(what)

    pool = Pool(make, 2)
    try:
        for size, (kinds, text, array) in zip(
            (1, 5_000_000, 3), pool.ordered((1, 5_000_000, 3), 2), strict=True
        ):
            assert [tensor.shape for tensor in kinds[:2]] == [(0, 3), ()]
            assert (
                torch.equal(kinds[3], torch.arange(12.0).view(3, 4).t()) and kinds[2].dtype == torch.bfloat16
            )
            assert text == "x" * size and np.array_equal(array, np.arange(size))
    finally:
        pool.close()
