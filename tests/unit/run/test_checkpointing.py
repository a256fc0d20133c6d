"""What torch.utils.checkpoint wraps is computed again in a captured step too, and saves what it saves in eager."""

# mypy: ignore-errors

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.cost.memory import step_memory
from plait.run.prepare.programs import Programs
from plait.run.proof.serial_run import run_serially

KINDS = {"plain": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


class Deep(nn.Module):
    """Four wide parts, each of which may be wrapped: a module, or a function of the model's."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Dropout(0.2), nn.Linear(256, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.parts[0].get_submodule("3").bias
        for index, part in enumerate(self.parts):
            wrapped = part if index % 2 else lambda h, part=part: part(h).sin()
            x = x + (checkpoint(wrapped, x, **KINDS[self.kind]) if self.kind else wrapped(x))
        return x


def job(kind: str | None) -> Job:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    return Job(
        model=lambda: Deep(kind), data=[(row, row) for row in x], loss=nn.MSELoss(), optimizer=sgd, batch=128,
        steps=2,
    )  # fmt: skip


def activations(made: Job, plan: str, ranks: int) -> int:
    captures = Captures(made)
    programs = Programs(made, captures.source, resolve(plan, ranks), torch.device("cpu"), captures=captures)
    return step_memory(programs.full_step()).activations


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_what_is_wrapped_is_not_kept_and_computes_the_same(kind: str) -> None:
    assert activations(job(kind), "single", 1) < 0.6 * activations(job(None), "single", 1)
    wanted = run_serially(job(None), resolve("single", 1), 2, torch.float64)
    plans = [("single", 1), *([("zero3", 2), ("1f1b", 2)] if kind == "plain" else [])]
    for plan, ranks in plans:
        found = run_serially(job(kind), resolve(plan, ranks), 2, torch.float64)
        assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
        for name, weight in wanted.weights.items():
            torch.testing.assert_close(found.weights[name].view_as(weight), weight, rtol=1e-12, atol=1e-14)


def test_the_run_says_so_and_the_plan_may_decide_otherwise() -> None:
    made = job("plain")
    (notice,) = Captures(made).of_size(128).notices
    assert "torch.utils.checkpoint around" in notice and "unless the plan sets memory.recompute" in notice
