"""Every plan over NCCL: ranks that share one GPU, each on a host of its own as NCCL sees it, equal one CPU process."""

from pathlib import Path

import pytest
from tests.zoo import ZOO

from plait.plan.named import resolve
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

NCCL = {"links": {"transport": "nccl"}}
CASES = [
    ("ddp", "gpt_tied", 2, None), ("ddp", "resnet_bn", 4, None), ("zero1", "gpt_tied", 2, None),
    ("zero3", "gpt_tied", 2, None), ("megatron", "gpt_tied", 2, None), ("domain", "unet", 2, None),
    ("naive", "gpt_tied", 2, None),
    ("gpipe", "gpt_tied", 2, None), ("1f1b", "gpt_tied", 4, None),
    ("interleaved", "gpt_tied", 2, None), ("zero-bubble", "gpt_tied", 2, None), ("zero-bubble-2", "gpt_tied", 2, None),
    ("1f1b", "gpt_tied", 4, {"pipe": 2, "data": 2}), ("1f1b", "gpt_tied", 4, {"pipe": 2, "tensor": 2}),
    ("local-sgd", "mlp", 2, None), ("diloco", "mlp", 2, None),
    ("zero2", "gpt_dropout", 4, None), ("tensor", "gpt_tied", 2, None),
    ("zero3", "gpt_tied", 4, {"data": 2, "tensor": 2}), ("zero1", "gpt_tied", 4, {"data": 2, "pipe": 2}),
    ("domain", "unet", 4, {"data": 2, "domain": 2}), ("interleaved", "gpt_tied", 4, {"pipe": 2, "tensor": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "name", "ranks", "mesh"), CASES, ids=lambda value: str(value))
def test_ranks_over_nccl_equal_one_process(
    plan: str, name: str, ranks: int, mesh: dict[str, int] | None
) -> None:
    job = ZOO[name].job(batch=8, steps=2, optimizer="adamw", clip_norm=0.5, accumulate=4)
    outcome = verify(job, resolve(plan, None if mesh else ranks, NCCL, mesh), steps=2, device="cuda")
    assert outcome.ok, outcome.first
