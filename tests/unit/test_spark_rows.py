"""Rows of a DataFrame as samples, without Spark."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from plait import spark
from plait.errors import DataError
from plait.job.job import Job


def test_a_row_that_gives_no_sample_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"x": [1.0], "y": 0}, {"x": [2.0], "y": None}]
    (tmp_path / "rows").write_bytes(b"".join(map(pickle.dumps, rows)))
    about = {"path": str(tmp_path / "rows"), "counts": [2], "own": 0}
    monkeypatch.setenv("PLAIT_ROWS", json.dumps(about))
    job = Job(
        model=lambda: nn.Linear(1, 2), data=[0], loss=nn.CrossEntropyLoss(), batch=1, epochs=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"row 1 of partition 0 .*columns x, y; null: y"):
        spark.rows_here(job, spark.tensors)
    with pytest.raises(DataError, match=r"row 0 .*KeyError: 'label' \(columns x, y; null: none"):
        spark.rows_here(job, lambda row: torch.tensor(row["label"]))
