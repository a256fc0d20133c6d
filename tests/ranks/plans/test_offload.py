"""Processes that keep state, parameters and activations on the host compute what one process does."""

import pytest
from tests.zoo import ZOO

from plait.plan.named import resolve
from plait.run.verify import verify

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("plan", "offload"),
    [
        ("zero3", ["optimizer", "gradients:0.5", "parameters", "activations"]),
        ("zero1", ["gradients"]),
        ("1f1b", ["gradients", "activations"]),
    ],
)
def test_offload_equals_one_process(plan: str, offload: list[str]) -> None:
    job = ZOO["gpt_tied"].job(batch=4, steps=2, optimizer="adamw", accumulate=2)
    outcome = verify(job, resolve(plan, 2, {"memory": {"offload": offload}}), steps=2)
    assert outcome.ok, outcome.first
