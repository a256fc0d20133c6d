"""DataLoaders, samplers and tar shards as the data of a job."""

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from plait.errors import DataError, JobError
from plait.job import open_data
from plait.job.checks import problems
from plait.job.job import Job
from plait.job.updates.freeze import Freeze

X = torch.arange(23.0).view(23, 1)
DATA = TensorDataset(X, X)


def make(data: Any = DATA, **fields: Any) -> Job:
    return Job(
        model=lambda: nn.Linear(1, 1), data=data, loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **fields,
    )  # fmt: skip


def ids(job: Job, steps: int) -> list[list[int]]:
    order = job.order(open_data(job.data).num_samples)
    assert order is not None
    return [order.at(step).ids.tolist() for step in range(steps)]


def test_a_data_loader_says_batch_order_collate_and_workers() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples

    job = make(DataLoader(DATA, batch_size=5, collate_fn=collate, num_workers=2, prefetch_factor=4))
    assert (job.batch, job.collate, job.workers, job.prefetch, job.shuffle) == (5, collate, 2, 4, False)
    assert job.data is DATA
    assert ids(job, 5) == [list(range(at, min(at + 5, 23))) for at in range(0, 23, 5)]
    assert job.total_steps(23) == 5
    shuffled = make(DataLoader(DATA, batch_size=5, shuffle=True, drop_last=True), workers=1)
    assert (shuffled.shuffle, shuffled.sampler, shuffled.drop_last, shuffled.workers) == (True, None, True, 1)
    assert shuffled.total_steps(23) == 4
    assert [len(step) for step in ids(shuffled, 4)] == [5] * 4
    assert len({index for step in ids(shuffled, 4) for index in step}) == 20
    accumulating = make(DataLoader(DATA, batch_size=5), batch=10, accumulate=2)
    assert accumulating.batch == 10


def test_weighted_samples_are_drawn_by_seed_and_epoch_alone() -> None:
    weights = [0.0] * 20 + [1.0] * 3
    generator = torch.Generator().manual_seed(3)
    for sampler in (
        WeightedRandomSampler(weights, 10),
        WeightedRandomSampler(weights, 10, generator=generator),
    ):
        job = make(batch=4, sampler=sampler, epochs=2)
        first = ids(job, 6)
        assert [len(step) for step in first] == [4, 4, 2] * 2
        assert {index for step in first for index in step} <= {20, 21, 22}
        torch.manual_seed(99)
        assert ids(make(batch=4, sampler=sampler), 6) == first  # whatever was drawn meanwhile
        assert ids(make(batch=4, sampler=sampler, seed=1), 6) != first
        assert first[:3] != first[3:]
        assert job.total_steps(23) == 6


def test_a_user_says_the_order_by_a_function_a_sampler_or_steps() -> None:
    assert ids(make(batch=2, sampler=lambda epoch: [epoch, 5, 6]), 4) == [[0, 5], [6], [1, 5], [6]]
    assert ids(make(batch=2, sampler=[7, 8, 9]), 2) == [[7, 8], [9]]
    steps = [[0, 1, 2], [3], [4, 5]]
    job = make(batch=3, sampler=steps, freeze=[Freeze(parameters="*", until=1, unit="epoch")], epochs=2)
    assert ids(job, 4) == [*steps, steps[0]]
    assert job.total_steps(23) == 6
    assert job.in_steps(23).freeze[0].until == 3
    batches = BatchSampler(SubsetRandomSampler(range(4)), 3, drop_last=False)
    loaded = make(DataLoader(DATA, batch_sampler=batches))
    assert loaded.batch == 3 and sorted(index for step in ids(loaded, 2) for index in step) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda epoch: [23], "names sample 23; the data has 23"),
        (lambda epoch: [-1], "names sample -1"),
        (lambda epoch: [], "gives nothing in epoch 0"),
        (lambda epoch: ["a"], "gives the str 'a'"),
        (lambda epoch: 1 // 0, "ZeroDivisionError"),
        (lambda epoch: range(epoch + 2), "gives 2 steps in epoch 1, and 1 in the first"),
    ],
)
def test_a_sampler_that_cannot_be_followed_is_named(sampler: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ids(make(batch=2, sampler=sampler), 2)


def test_contradictions_are_refused() -> None:
    with pytest.raises(JobError, match="both sampler and lengths"):
        make(batch=2, sampler=[1], lengths=[1] * 23)
    with pytest.raises(JobError, match="batch is 0"):
        make()
    with pytest.raises(JobError, match="workers is -1"):
        make(batch=2, workers=-1)
    with pytest.raises(DataError, match="worker_init_fn"):
        make(DataLoader(DATA, batch_size=2, worker_init_fn=print))
    with pytest.raises(DataError, match="batch_size=None"):
        make(DataLoader(DATA, batch_size=None), batch=2)
    assert any(
        "sampler is given for a stream" in line for line in problems(make(batch=2, sampler=[1]), None, 1)
    )
    assert any("drop_last" in line for line in problems(make(batch=30, drop_last=True), 23, 1))


def test_evaluation_reads_what_a_data_loader_chooses() -> None:
    assert open_data(DataLoader(DATA, batch_size=5, shuffle=True)).num_samples == 23
    assert open_data(DataLoader(DATA, batch_size=5, drop_last=True)).num_samples == 20
    some = open_data(DataLoader(DATA, batch_size=5, sampler=SubsetRandomSampler([3, 4])))
    assert sorted(some.fetch(torch.tensor([0, 1]))[0].flatten().tolist()) == [3.0, 4.0]
    assert open_data(DataLoader(DATA, sampler=SequentialSampler(DATA))).num_samples == 23
    twice = RandomSampler(DATA, replacement=True, num_samples=40)
    assert open_data(DataLoader(DATA, sampler=twice)).num_samples == 40


def write_tar(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, members in samples.items():
            for extension, content in members.items():
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


def test_tar_shards_are_read_by_number(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.ones(2))
    for shard in range(3):
        write_tar(
            tmp_path / f"train-{shard:03d}.tar",
            {
                f"d/{shard}{at}": {
                    "cls": b"%d" % at, "txt": b"word", "json": json.dumps({"a": at}).encode(),
                    "npy": array.getvalue(), "seg.png": b"\x89",
                }
                for at in range(4)
            },
        )  # fmt: skip
    for path in (str(tmp_path), f"{tmp_path}/train-{{000..002}}.tar"):
        source = open_data(path, list)
        assert source.num_samples == 12
        (sample,) = source.fetch(torch.tensor([6]))
        assert sample["__key__"] == "d/12" and (sample["cls"], sample["txt"], sample["json"]) == (
            2,
            "word",
            {"a": 2},
        )
        assert sample["npy"].tolist() == [1.0, 1.0] and sample["seg.png"] == b"\x89"
    assert open_data(f"{tmp_path}/train-001.tar").num_samples == 4
    with pytest.raises(DataError, match=r"train-003.tar \(1 of 4 are missing\)"):
        open_data(f"{tmp_path}/train-{{000..003}}.tar")


def test_what_is_damaged_in_a_shard_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0": {"cls": b"1"}, "1": {"cls": b"x"}, "2": {"npy": b"\x80\x04K\x01."}})
    source = open_data(str(tmp_path / "a.tar"), lambda samples: samples)
    with pytest.raises(DataError, match=r"sample 1 \(file .*a.tar, 1.cls\) is damaged"):
        source.fetch(torch.tensor([1]))
    with pytest.raises(DataError, match=r"sample 2 .*2.npy.* is damaged"):
        source.fetch(torch.tensor([2]))  # a pickle is never loaded
    (tmp_path / "b.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match="b.tar cannot be read as tar"):
        open_data(str(tmp_path / "b.tar"))


class Odd(torch.utils.data.Dataset[Any]):
    """Its length is none, and its fourth sample ends the process."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return DATA[index] if index != 3 else sys.exit(9)


def test_a_dataset_without_a_length_or_that_ends_the_process_is_told() -> None:
    with pytest.raises(DataError, match=r"len\(data\) failed: ValueError"):
        open_data(Odd(-3))
    with pytest.raises(DataError, match=r"sample 3 is damaged, read at .*test_sources.py:\d+: SystemExit: 9"):
        open_data(Odd(5)).fetch(torch.tensor([2, 3]))
