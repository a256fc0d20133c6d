"""What users of other systems ask for and no other test is named after: models of any kind, under any plan."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.unit.run.training import captures, uncapturable_job
from tests.unit.run.within.within import assert_equal
from torch import Tensor, nn

from plait.errors import PlanError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.prepare.programs import Programs
from plait.run.verify import verify

WIDTH = 8


class Unruly(nn.Module):
    """What pipelines of other systems stop at: skips over stages, keywords, dicts, branches, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 3), "b": nn.Linear(2 * WIDTH, 3)})

    def forward(self, *, x: Tensor, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        start = torch.tanh(self.first(x))
        h = start
        for turn in range(extra["turns"]):
            h = self.middle(h) + start if turn % 2 else torch.relu(self.middle(h))
        return {"a": self.heads["a"](h), "b": self.heads["b"](torch.cat([h, x], -1))}


def unruly_job() -> Job:
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(12, WIDTH + 3, generator=generator)

    def objective(model: Any, batch: Tensor) -> Tensor:
        found = model(x=batch[:, :WIDTH], extra={"turns": 3})
        return nn.functional.mse_loss(found["a"] + found["b"].sigmoid(), batch[:, WIDTH:])

    return Job(
        model=Unruly,
        data=samples,
        objective=objective,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch=6,
        steps=2,
        accumulate=2,
        clip_norm=0.5,
    )


@pytest.mark.parametrize(("plan", "mesh"), [("1f1b", {"pipe": 3}), ("zero-bubble", {"pipe": 2, "data": 2})])
def test_complaint_18_a_pipeline_of_a_model_that_is_no_sequence(plan: str, mesh: dict[str, int]) -> None:
    assert_equal(verify(unruly_job(), plan, None, mesh=mesh, serial=True))


def test_complaint_18_a_model_that_cannot_be_cut_names_its_line_and_trains_whole() -> None:
    job = uncapturable_job()
    with pytest.raises(PlanError, match=r"needs the inside of the model for pipe=2.*zoo\.py:\d+") as found:
        verify(job, "1f1b", 2, serial=True)
    assert "ddp" in str(found.value.fix)
    assert verify(job, "ddp", 2, serial=True).ok


PLANS: dict[str, dict[str, int]] = {
    "ddp": {"data": 2}, "zero3": {"data": 2}, "megatron": {"tensor": 2}, "1f1b": {"pipe": 2},
    "interleaved": {"pipe": 2}, "server-sync": {"data": 2}, "local-sgd": {"data": 2}, "easgd": {"data": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ["alexnet", "lstm", "graph_network", "hf_gpt2"])
def test_complaint_19_any_model_under_any_plan_without_edits(name: str) -> None:
    """A network of images, one of sequences, one of graphs, one of Hugging Face's: compiled and checked, or a reason.

    That they compute what one process does is shown in the parity tests.
    """
    known = captures(name, torch.float64, "fp32")
    refused = {}
    for plan, mesh in PLANS.items():
        chosen = resolve(plan, None, None, mesh)
        programs = Programs(known.job, known.source, chosen, torch.device("cpu"), torch.float64, known)
        try:
            programs.full_step()
        except PlanError as error:
            refused[plan] = error
        assert programs.capture_error is None
    assert refused.keys() <= {"megatron"}, refused
    assert all(error.fix and "tensor=2" in error.what for error in refused.values())
