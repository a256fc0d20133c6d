"""The learning-rate finder: a curve of a real run, and what it says."""

import json
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from torch import nn

import plait
from plait.api.rates import rates_of
from plait.errors import UsageError


def _job() -> plait.Job:
    """A quadratic of curvature 2: gradient descent diverges over a rate of 1."""
    inputs = torch.eye(4).repeat(4, 1) * 2.0
    return plait.Job(
        model=lambda: nn.Linear(4, 1, bias=False), data=list(zip(inputs, inputs.sum(1, keepdim=True), strict=True)),
        loss=nn.MSELoss(), batch=16, steps=3, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip


@pytest.mark.parametrize(("plan", "ranks"), [("single", 1), ("threads", 2)])
def test_the_rate_is_below_where_descent_diverges(plan: str, ranks: int) -> None:
    found = plait.find_lr(_job(), plan, ranks, lowest=1e-4, highest=100.0, steps=80)
    assert 0.01 < found.steepest < 1.0 and found.steepest < found.lowest < 8.0
    assert len(found.losses) < 80 and found.rates[0] == pytest.approx(1e-4)
    assert [round(b / a, 6) for a, b in zip(found.rates, found.rates[1:], strict=False)] == pytest.approx(
        [1e6 ** (1 / 79)] * (len(found.rates) - 1), rel=1e-5
    )
    assert found.picture().startswith("<svg") and "learning rate" in found.picture()


def test_curves_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="do not grow"):
        plait.find_lr(_job(), lowest=1.0, highest=0.1)
    with pytest.raises(UsageError, match="too few"):
        plait.find_lr(_job(), steps=3)
    with pytest.raises(UsageError, match="no number after 2 steps"):
        rates_of([1e-3, 1e-2], [1.0, 2.0])


def test_the_command_tells_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = jobs.cli("lr", jobs.reference("plain"), "--steps", "12", "--json", "--out", tmp_path / "lr.svg")
    said = json.loads(capsys.readouterr().out)
    assert code == 0 and said["steepest"] <= said["lowest"] and (tmp_path / "lr.svg").exists()
