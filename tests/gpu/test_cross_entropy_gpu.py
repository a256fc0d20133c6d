"""A loss of many classes on a GPU, from scores in 16 bits: the kernel, and a whole step."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.job.job import Job
from plait.program.local import cross_entropy
from plait.run.parallelize import parallelize
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]
CLASSES = 5003
"""More than a kernel takes at a time, and odd."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 33])
def test_kernels_equal_torch(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    scores = (10 * torch.randn(rows, CLASSES, generator=generator, device="cuda")).to(dtype)
    scores[0, 5] = float("-inf")
    labels = torch.randint(6, CLASSES, (rows,), generator=generator, device="cuda")
    labels[1:2] = -100
    assert cross_entropy._kernels() is not None
    loss, total, sums = cross_entropy.row_losses(scores, labels, None, 1, -100, torch.float32)
    tangent = torch.tensor(2.0, device="cuda")
    found = cross_entropy.row_gradients(tangent, scores, labels, None, 1, -100, total, sums, dtype)
    exact = scores.double().requires_grad_()
    expected = F.cross_entropy(exact, labels)
    (2 * expected).backward()
    assert exact.grad is not None
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2e-5}[dtype]
    torch.testing.assert_close(found.double(), exact.grad, rtol=rounding, atol=1e-7)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(x)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=3)


def job(precision: str) -> Job:
    tokens = torch.randint(0, CLASSES, (16, 7), generator=torch.Generator().manual_seed(0))
    return Job(
        model=Tokens, data=(tokens, tokens.roll(1, 1).contiguous()), loss=loss_of, batch=8, steps=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), precision=precision,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("how", ["off", "on"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-weights"])
def test_steps_equal_the_processors(precision: str, how: str) -> None:
    given = job(precision)
    losses = []
    for device in ("cuda", "cpu"):
        step = parallelize(
            given, "single", device=device, settings={"compile": how if device == "cuda" else "off"}
        )
        batch = tuple(tensor[:8].to(device) for tensor in given.data)
        losses.append([float(step(batch)) for _ in range(3)])
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert losses[0][2] < losses[0][0]


@pytest.mark.parametrize("fp32", [False, True])
def test_equals_one_process(fp32: bool) -> None:
    outcome = verify(job("fp32"), "ddp", 2, steps=2, device="cuda", fp32=fp32)
    assert outcome.ok, outcome.first
