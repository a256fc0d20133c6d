"""Segments as CUDA graphs equal one CPU process: random numbers, batch norm, several micro-batches, two ranks."""

from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import ZOO

from plait.callbacks import Callback, StepDone, Stop, Watching
from plait.options import Changes
from plait.plan.named import resolve
from plait.run.interpret.captured import CudaRecorder
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


def test_graphs_are_recorded_again_when_all_are_gone() -> None:
    """As when compiled segments take the place of written ones: torch refuses memory whose graphs are gone."""
    recorder = CudaRecorder()
    given = torch.ones(1000, device="cuda")
    for factor in (2, 3):
        (found,), replay = recorder.record(partial(product, given, factor))
        replay()
        assert float(found.sum()) == 1000 * factor
        del found, replay


def product(given: torch.Tensor, factor: int) -> tuple[torch.Tensor]:
    return (given * factor,)


class UntilCapturedAgain(Callback):
    """Hears of what is told, and ends the run when graphs were captured after segments were compiled."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def hear(self, event: dict[str, Any]) -> None:
        self.told.append(str(event.get("notice", "")))

    @property
    def after(self) -> list[str]:
        """What was told since segments run compiled."""
        return list(dropwhile(lambda text: "segments run compiled" not in text, self.told))

    def on_step(self, event: StepDone) -> Stop | None:
        return Stop(reason="seen") if any("run as CUDA graphs" in text for text in self.after) else None


def test_compiled_segments_are_captured_after_they_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many steps go by meanwhile depends on how busy the host's processors are."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    seen = UntilCapturedAgain()
    train(
        ZOO["gpt"].job(16, 1_000_000, optimizer="adamw", num_samples=16),
        "single",
        changes=Changes(settings={"compile": "on"}),
        device="cuda",
        out=tmp_path / "run",
        watching=Watching(callbacks=[seen], listener=seen.hear),
    )
    assert any("run as CUDA graphs" in text for text in seen.after), seen.told
    assert not any("cannot be a CUDA graph" in text for text in seen.told), seen.told
