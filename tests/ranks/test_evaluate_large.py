"""Held-out data under plans that cut a model for the whole of which ranks have no room."""

from pathlib import Path

import pytest
import torch
from tests.ranks.jobs import right, samples
from torch import nn

import plait
from plait.options import Limits


def job() -> plait.Job:
    """Layers of 17 kB, 90 kB in all; seven samples held out, so that two ranks have unequal numbers of them."""
    return plait.Job(
        model=lambda: nn.Sequential(
            nn.Linear(16, 64),
            *(layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())),
            nn.Linear(64, 10),
        ),
        data=lambda: samples(8),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=4,
        epochs=1,
        evaluate=lambda: samples(7, seed=1),
        metrics={"accuracy": right},
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", ["1f1b", "megatron"])
def test_evaluation_counts_each_sample_where_no_rank_has_room_for_the_model(
    plan: str, tmp_path: Path
) -> None:
    said: list[str] = []
    listen = lambda event: said.append(event["notice"]) if "notice" in event else None  # noqa: E731
    wanted = plait.train(job(), "single", out=tmp_path / "one").evaluation
    found = plait.train(
        job(),
        plan,
        ranks=2,
        limits=Limits(memory="210kB"),
        watching=plait.Watching(listener=listen),
        out=tmp_path / "two",
    ).evaluation
    assert found == pytest.approx(wanted, rel=1e-5)
    assert any("fetched as it is used" in line for line in said), said
