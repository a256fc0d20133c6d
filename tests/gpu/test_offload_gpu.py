"""What lies in the host's memory between its uses equals one CPU process: streams, pinned memory, two ranks."""

from pathlib import Path
from typing import Any

import pytest
from tests.zoo import ZOO

from plait.plan.named import resolve
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]

EVERYTHING = ["optimizer", "parameters", "activations"]
CASES = [
    ("single", "gpt_dropout", 1, {}, EVERYTHING),
    ("single", "gpt_tied", 1, {"clip_norm": 0.5, "accumulate": 2}, EVERYTHING),
    ("single", "gpt_tied", 1, {"clip_norm": 0.5}, ["optimizer", "gradients:0.5"]),
    ("ddp", "gpt_tied", 2, {}, ["optimizer"]),
    ("zero1", "gpt_tied", 2, {}, ["gradients"]),
    ("zero3", "gpt_tied", 2, {}, EVERYTHING),
    ("1f1b", "gpt_tied", 2, {"accumulate": 2}, ["gradients", "activations"]),
]


@pytest.mark.parametrize(("plan", "name", "ranks", "options", "offload"), CASES, ids=str)
def test_offload_equals_one_process(
    plan: str, name: str, ranks: int, options: dict[str, Any], offload: list[str]
) -> None:
    job = ZOO[name].job(batch=8, steps=4, optimizer="adamw", **options)
    outcome = verify(job, resolve(plan, ranks, {"memory": {"offload": offload}}), steps=4, device="cuda")
    assert outcome.ok, outcome.first
