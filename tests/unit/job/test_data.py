"""Every kind of data opens as a Source, and what is no data is refused with a fix."""

import builtins
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from plait.errors import DataError
from plait.job import open_data

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


class Squares(Dataset[tuple[Tensor, int]]):
    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(index)]), index * index


class Counting(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(5.0))


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        lambda: (X, Y),
        functools.partial(TensorDataset, X, Y),
        [(X[i], Y[i]) for i in range(10)],
        list(zip(X.numpy(), Y.numpy(), strict=True)),
        Subset(TensorDataset(X, Y), list(range(10))),
    ],
)
def test_pairs_of_inputs_and_targets(data: Any) -> None:
    source = open_data(data)
    assert source.num_samples == 10
    x, y = source.fetch(ids(7, 2, 2))
    assert torch.equal(x, X[[7, 2, 2]])
    assert torch.equal(y, Y[[7, 2, 2]])
    x, y = source.fetch(ids())
    assert (x.shape, x.dtype) == ((0, 2), X.dtype)
    assert (y.shape, y.dtype) == ((0,), Y.dtype)


def test_one_tensor_and_a_dict_of_tensors() -> None:
    assert torch.equal(open_data(X).fetch(ids(3, 1)), X[[3, 1]])
    batch = open_data({"x": X, "y": Y.numpy()}).fetch(ids(3, 1))
    assert list(batch) == ["x", "y"]
    assert torch.equal(batch["y"], Y[[3, 1]])
    assert open_data({"x": X}).fetch(ids())["x"].shape == (0, 2)


def test_map_style_datasets_and_their_classes() -> None:
    for data in (Squares(), Squares):
        source = open_data(data)
        assert source.num_samples == 10
        x, y = source.fetch(ids(3, 9))
        assert x.tolist() == [[3.0], [9.0]]
        assert y.tolist() == [9, 81]
        assert source.fetch(ids())[0].shape == (0, 1)


def test_subsets_pick_through() -> None:
    nested = Subset(Subset(TensorDataset(X, Y), [9, 8, 7, 6]), [3, 0])
    source = open_data(nested)
    assert source.num_samples == 2
    assert source.fetch(ids(0, 1))[1].tolist() == [6, 9]


def test_a_dataset_that_reads_many_at_once_is_asked_once() -> None:
    class Many(Squares):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
            Many.calls += 1
            return [self[index] for index in indices]

    assert open_data(Many()).fetch(ids(1, 2, 3))[1].tolist() == [1, 4, 9]
    assert Many.calls == 1


def test_a_tensor_dataset_with_its_own_getitem_keeps_it() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 1, y

    assert torch.equal(open_data(Noisy(X, Y)).fetch(ids(1))[0], X[[1]] + 1)


@pytest.mark.parametrize("data", [(X, Y), [(X[i], Y[i]) for i in range(10)]])
def test_the_users_collate_gets_a_list_of_samples(data: Any) -> None:
    def collate(samples: list[Any]) -> dict[str, Tensor]:
        assert isinstance(samples, list)
        return {"x": torch.stack([x for x, _ in samples]) * 2}

    source = open_data(data, collate)
    assert torch.equal(source.fetch(ids(4, 5))["x"], X[[4, 5]] * 2)
    assert source.fetch(ids())["x"].shape == (0, 2)


def test_ragged_samples_need_and_use_collate() -> None:
    ragged = [torch.ones(n) for n in (1, 3, 2, 5, 4, 2)]
    with pytest.raises(DataError, match="2 samples cannot be put into one batch"):
        open_data(ragged).fetch(ids(0, 1))
    padded = open_data(ragged, functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True))
    assert padded.fetch(ids(0, 1)).shape == (2, 3)


def test_pictures_of_several_sizes_are_samples_though_all_have_three_channels() -> None:
    pictures = [torch.ones(3, size, size) for size in (4, 6, 5, 8, 7)]
    padded = open_data(pictures, lambda samples: torch.stack([s[:, :4, :4] for s in samples]))
    assert padded.num_samples == 5
    assert padded.fetch(ids(1, 4)).shape == (2, 3, 4, 4)


def test_a_long_list_of_equal_tensors_is_samples_and_a_short_one_is_refused() -> None:
    assert open_data([torch.ones(3)] * 6).num_samples == 6
    assert open_data((torch.ones(3), torch.zeros(3))).num_samples == 3
    with pytest.raises(DataError, match="may mean 2 samples or 2 columns"):
        open_data([torch.ones(3), torch.zeros(3)])


@pytest.mark.parametrize(
    "data",
    [
        lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]),
        lambda: (float(i) for i in range(1, 6)),
        {1.0, 2.0, 3.0, 4.0, 5.0},
    ],
)
def test_streams_have_no_length_and_are_read_in_order(data: Any) -> None:
    source = open_data(data)
    assert source.num_samples is None
    assert source.fetch(ids(0, 1)).tolist() == [1.0, 2.0]
    assert source.fetch(ids(3)).tolist() == [4.0]
    assert source.fetch(ids(0)).tolist() == [1.0]
    assert source.fetch(ids()).shape == (0,)
    with pytest.raises(DataError, match="sample 7 was asked for; the stream has 5"):
        source.fetch(ids(7))


def test_an_iterable_dataset_is_a_stream() -> None:
    source = open_data(Counting())
    assert source.num_samples is None
    assert source.fetch(ids(0, 1, 4)).tolist() == [0.0, 1.0, 4.0]


def fail_to_load() -> Any:
    raise FileNotFoundError("digits.csv")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (5, "the data is the int 5"),
        (object(), "the data is an object"),
        (torch.tensor(1.0), "a single number"),
        ((X, Y[:9]), "0: 10, 1: 9"),
        ({"x": X, "y": Y[:3]}, "'x': 10, 'y': 3"),
        ((X, [1, 2]), "column 1 is a list"),
        ({"x": X, "y": "text"}, "column 'y' is the str"),
        ({"x": 1}, "the data is a dict"),
        ((np.array(["a", "b"]), np.zeros(2)), "<U1 values"),
        ([X, Y[:9]], "may mean"),
        ([], "0 samples"),
        (X[:0], "0 samples"),
        (Squares(0), "0 samples"),
        (iter([1, 2]), "read only once"),
        (lambda: DataLoader(Squares()), "DataLoader"),
        (lambda path: X, "needs the arguments path"),
        (fail_to_load, "FileNotFoundError: digits.csv"),
        ("nowhere.parquet", "there is no file nowhere.parquet"),
        (Path(__file__), "is not a Parquet file"),
        (Path(__file__).parent, "holds no .parquet file"),
    ],
)
def test_what_is_no_data_is_refused_with_a_fix(data: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        open_data(data)
    assert words in caught.value.what
    assert caught.value.fix


def test_a_failing_data_function_is_named_with_its_own_line() -> None:
    with pytest.raises(DataError, match=r"fail_to_load failed at .*test_data.py:\d+") as caught:
        open_data(fail_to_load)
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_rows_of_tensors_are_picked_without_python_per_sample() -> None:
    source = open_data((torch.zeros(10_000, 64), torch.zeros(10_000, dtype=torch.int64)))
    chosen = torch.randperm(10_000)[:64]
    spans = []
    for _ in range(300):
        begin = time.thread_time()
        source.fetch(chosen)
        spans.append(time.thread_time() - begin)
    # Time on the processor, whatever else runs: about 10 us where this was written; sample by sample, about 400 us.
    assert sorted(spans)[len(spans) // 2] < 100e-6


# Hugging Face datasets


def test_huggingface_datasets_become_dict_batches() -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    data = datasets.Dataset.from_dict(
        {"tokens": [[i, i + 1] for i in range(6)], "score": [i / 2 for i in range(6)], "text": list("abcdef")}
    )
    source = open_data(lambda: data)
    assert source.num_samples == 6
    batch = source.fetch(ids(4, 1))
    assert batch["tokens"].tolist() == [[4, 5], [1, 2]]
    assert (batch["tokens"].dtype, batch["score"].dtype) == (torch.int64, torch.float32)
    assert batch["text"] == ["e", "b"]
    empty = source.fetch(ids())
    assert (empty["tokens"].shape, empty["text"]) == ((0, 2), [])


def test_huggingface_collate_ragged_rows_streams_and_splits() -> None:
    datasets = pytest.importorskip("datasets", reason="the optional package datasets is not installed")
    data = datasets.Dataset.from_dict({"tokens": [[1], [2, 3], [4, 5, 6]]})
    with pytest.raises(DataError, match=r"'tokens' has rows of different shapes \(\(1,\), \(2,\)\)"):
        open_data(data).fetch(ids(0, 1))

    def pad(samples: list[dict[str, list[int]]]) -> Tensor:
        longest = max(len(sample["tokens"]) for sample in samples)
        return torch.tensor(
            [sample["tokens"] + [0] * (longest - len(sample["tokens"])) for sample in samples]
        )

    assert open_data(data, pad).fetch(ids(0, 2)).tolist() == [[1, 0, 0], [4, 5, 6]]
    stream = open_data(data.to_iterable_dataset(), pad)
    assert stream.num_samples is None
    assert stream.fetch(ids(0, 1)).tolist() == [[1, 0], [2, 3]]

    def stack(samples: list[dict[str, Tensor]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)

    assert open_data(data.with_format("torch"), stack).fetch(ids(0, 2)).tolist() == [[1, 0, 0], [4, 5, 6]]
    with pytest.raises(DataError, match="several splits"):
        open_data(datasets.DatasetDict({"train": data}))


# Parquet


def write(path: Path, columns: dict[str, Any], **options: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the optional package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, **options)


def test_parquet_columns_become_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    grid = [[[i, 0.5], [1.5, 2.5]] for i in range(7)]
    write(
        path,
        {"x": [[i / 2, 1.0] for i in range(7)], "y": range(7), "flag": [True] * 7, "grid": grid},
        row_group_size=3,
    )
    for data in (path, str(path), lambda: path):
        source = open_data(data)
        assert source.num_samples == 7
        batch = source.fetch(ids(6, 0))
        assert batch["x"].tolist() == [[3.0, 1.0], [0.0, 1.0]]
        assert batch["y"].tolist() == [6, 0]
        assert batch["grid"].shape == (2, 2, 2)
        assert batch["grid"][0, 0].tolist() == [6.0, 0.5]
        assert [batch[name].dtype for name in ("x", "y", "flag")] == [torch.float32, torch.int64, torch.bool]
        assert source.fetch(ids())["x"].shape == (0, 2)


def test_a_folder_of_parquet_files_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", {"y": [3, 4]})
    write(tmp_path / "a.parquet", {"y": [1, 2]})
    assert open_data(tmp_path).fetch(ids(0, 1, 2, 3))["y"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("column", [["a", "b"], [[1], [2, 3]], [[1], [2, 3, 4]], [1, None]])
def test_a_column_that_no_tensor_holds_is_named_or_left_to_collate(tmp_path: Path, column: list[Any]) -> None:
    path = tmp_path / "a.parquet"
    write(path, {"odd": column, "y": [5, 6]})
    with pytest.raises(DataError, match="column 'odd'"):
        open_data(path)

    def collate(samples: list[dict[str, Any]]) -> Tensor:
        assert len(samples) == 2
        assert "odd" in samples[0]
        return torch.stack([sample["y"] for sample in samples])

    assert open_data(path, collate).fetch(ids(1, 0)).tolist() == [6, 5]


def test_ragged_parquet_rows_reach_collate_as_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, {"tokens": [[1], [2, 3]]})
    source = open_data(path, lambda samples: torch.cat([sample["tokens"] for sample in samples]))
    assert source.fetch(ids(0, 1)).tolist() == [1, 2, 3]


def test_broken_empty_and_unreadable_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_data(tmp_path / "broken.parquet")
    write(tmp_path / "empty.parquet", {"y": []})
    with pytest.raises(DataError, match="0 rows"):
        open_data(tmp_path / "empty.parquet")

    real_import = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError) as caught:
        open_data(tmp_path / "empty.parquet")
    assert caught.value.fix == "pip install pyarrow."
