"""In real processes, a step that fails is told last in the user's words, and with `--detect-nan` NaN is too."""

from pathlib import Path

import pytest
import torch
from tests.unit.run.interpret import test_blame as one
from torch import nn

import plait
from plait.errors import StepError

pytestmark = pytest.mark.timeout(120)


def job(word: int = 1, scale: float = 1.0) -> plait.Job:
    return plait.Job(
        model=one.Net,
        data=one.samples(word, scale),
        objective=lambda model, batch: nn.functional.cross_entropy(model(*batch[:2]), batch[2]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=24,
        steps=1,
    )


@pytest.mark.parametrize(
    ("made", "comment", "module"),
    [(job(word=11), "# the lookup", "body.table"), (job(scale=-2.0), "# the logarithm", "body")],
)
def test_the_last_words_are_the_users_line(
    tmp_path: Path, made: plait.Job, comment: str, module: str
) -> None:
    limits = plait.Limits(check=False, detect_nan=module == "body")
    with pytest.raises(StepError) as caught:
        plait.train(made, "ddp", 2, out=tmp_path, saving=plait.Saving(trace=False), limits=limits)
    error, text = caught.value, str(caught.value)
    assert error.where == one.line(comment) and text.startswith(f"{error.where} in module {module}: ")
    assert one.BAD in error.ids and "micro-batch 0, samples" in text and "Fix: " in text
    assert "<plait segment" not in text and "Traceback" not in text
