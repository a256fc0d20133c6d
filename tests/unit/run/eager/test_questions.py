"""Code that does something else where it is traced computes what it computes in eager."""

from pathlib import Path
from typing import Any

import torch
from tests.ordinary import Base, job
from torch import Tensor

from plait.callbacks import Watching
from plait.run.train import train
from plait.run.verify import verify


class Asks(Base):
    """As transformers does about the mask of padding: `is_tracing(padding_mask)`."""

    def middle(self, h: Tensor) -> Tensor:
        if isinstance(h, torch._subclasses.FakeTensor) or (h > 100).any():
            return h * 2
        return h.tanh()


def test_a_run_goes_on_with_what_eager_computes(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    train(job(Asks), "single", out=tmp_path / "run", steps=1, watching=Watching(listener=heard.append))
    told = [event["notice"] for event in heard if "notice" in event]
    assert any("test_questions.py:19 asks whether it is traced" in line for line in told), told
    assert any(line.startswith("capture checked") for line in told)
    assert type(torch._subclasses).__name__ == "module"


def test_verify_compares_with_what_eager_computes() -> None:
    outcome = verify(job(Asks), "ddp", 2, serial=True, steps=2)
    assert outcome.ok and all(difference.largest < 1e-12 for difference in outcome.eager)
