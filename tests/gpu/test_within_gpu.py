"""Plans that cut models and samples, on a GPU that two ranks share: equal to one CPU process."""

from pathlib import Path

import pytest
from tests.zoo import ZOO

from plait.plan.named import resolve
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

CASES = [
    ("zero1", "gpt"),
    ("zero2", "mlp"),
    ("zero3", "gpt_tied"),
    ("zero3", "resnet_bn"),
    ("megatron", "gpt"),
    ("megatron", "gpt_dropout"),
    ("megatron", "hf_bert"),
    ("domain", "unet"),
    ("domain", "gpt"),
    ("1f1b", "gpt_tied"),
    ("zero-bubble", "gpt"),
]


@pytest.mark.parametrize(("plan", "name"), CASES)
def test_two_ranks_on_one_gpu_equal_one_process(plan: str, name: str) -> None:
    job = ZOO[name].job(batch=8, steps=2, optimizer="adamw", clip_norm=0.5, accumulate=2)
    outcome = verify(job, resolve(plan, 2), steps=2, device="cuda")
    assert outcome.ok, outcome.first
