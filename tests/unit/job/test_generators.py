"""The caller's random generators are none of plait's business."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ranks import jobs

import plait

CALLS: dict[str, Callable[[Path], object]] = {
    "train": lambda out: plait.train(jobs.plain(), "single", steps=1, out=out),
    "verify": lambda out: plait.verify(jobs.plain(), "ddp", 2, steps=1, serial=True),
    "parallelize": lambda out: plait.parallelize(jobs.plain(), "single"),
}


@pytest.mark.parametrize("name", CALLS)
def test_generators_go_on_where_they_were(name: str, tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.random())

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    wanted = draw()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    CALLS[name](tmp_path / "run")
    assert draw() == wanted
