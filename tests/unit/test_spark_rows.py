"""Rows of a partition: what partitions of unequal length leave out is told."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import plait


@pytest.mark.parametrize(("counts", "told"), [([3, 3], None), ([4, 3], "1 of 7 rows are left out")])
def test_rows_that_are_left_out_are_told(
    counts: list[int], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    from plait.spark import rows_here

    with (tmp_path / "rows").open("wb") as file:
        for row in range(counts[0]):
            pickle.dump({"x": float(row)}, file)
    about = {"path": str(tmp_path / "rows"), "counts": counts, "own": 0}
    monkeypatch.setenv("PLAIT_ROWS", json.dumps(about))
    job = plait.Job(
        model=nn.Linear(1, 1), data=[torch.zeros(1)], loss=nn.MSELoss(), batch=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )  # fmt: skip
    made = rows_here(job, lambda row: torch.tensor([row["x"]]))
    assert len(made.data) == 2 * min(counts)
    assert [
        str(warned.message) for warned in recwarn.list if told and told in str(warned.message)
    ] or told is None
    assert told is not None or not recwarn.list
