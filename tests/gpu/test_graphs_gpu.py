"""Segments as CUDA graphs equal one CPU process: random numbers, batch norm, several micro-batches, two ranks."""

from pathlib import Path

import pytest
from tests.zoo import ZOO

from plait.callbacks import Watching
from plait.plan.named import resolve
from plait.run.train import train
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]

CASES = [
    ("single", "gpt_dropout", 1, {}),
    ("single", "resnet_bn", 1, {"accumulate": 2}),
    ("single", "lstm", 1, {}),
    ("ddp", "gpt_dropout", 2, {}),
    ("zero3", "gpt_tied", 2, {}),
]


@pytest.mark.parametrize(("plan", "name", "ranks", "options"), CASES, ids=lambda value: str(value))
def test_graphs_equal_one_process(plan: str, name: str, ranks: int, options: dict[str, int]) -> None:
    job = ZOO[name].job(batch=8, steps=4, optimizer="adamw", clip_norm=0.5, **options)
    outcome = verify(job, resolve(plan, ranks, {"graphs": "on"}), steps=4, device="cuda")
    assert outcome.ok, outcome.first


def test_a_small_step_is_captured_by_itself(tmp_path: Path) -> None:
    told: list[str] = []
    job = ZOO["gpt"].job(16, 12, optimizer="adamw", num_samples=16)
    train(
        job,
        device="cuda",
        out=tmp_path / "run",
        watching=Watching(listener=lambda event: told.append(str(event.get("notice", "")))),
    )
    assert any("run as CUDA graphs" in text for text in told), told
