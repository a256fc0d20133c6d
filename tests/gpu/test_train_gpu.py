"""Training on one CUDA device: the same jobs, checked against the CPU.

Two ranks share the device over sockets of the run: NCCL refuses two ranks on one GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import ZOO

from plait.graph.ops import scaled
from plait.plan.named import resolve
from plait.run.parallelize import parallelize
from plait.run.start.launch import Seat, launch
from plait.run.train import train
from plait.run.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]
"""Asked by file, not by torch.cuda: touching CUDA in the parent would forbid forked workers."""

CASES = [
    "mlp", "alexnet", "resnet_bn", "lstm", "gpt", "gpt_tied", "gpt_dropout", "hf_gpt2", "hf_llama", "hf_bert", "hf_vit",
    "hf_t5", "unet", "encoder", "ignore_index", "label_smoothing",
]  # fmt: skip


SHARED = ["resnet_bn", "lstm", "gpt_dropout", "hf_bert", "ignore_index"]
"""Those that two ranks train as well: statistics, random numbers and weights of losses over both."""


@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in CASES), *((name, 2) for name in SHARED)])
def test_float64_on_the_gpu_equals_one_cpu_process(name: str, ranks: int) -> None:
    job = ZOO[name].job(7, 3, optimizer="adamw", num_samples=19, clip_norm=1.0)
    outcome = verify(job, "ddp", ranks, device="cuda")
    assert outcome.ok, outcome.first


@pytest.mark.parametrize("name", ["mlp", "resnet_bn", "gpt", "gpt_dropout"])
def test_fp32_gradients_on_the_gpu_equal_the_cpu(name: str) -> None:
    outcome = verify(ZOO[name].job(8, 3, optimizer="adamw"), "ddp", 2, device="cuda", fp32=True)
    gradient = next(d for d in outcome.differences if d.kind == "gradient")
    assert gradient.largest < 1e-4, outcome.first  # other kernels sum in other orders than the CPU's


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_learns(tmp_path: Path, ranks: int, precision: str) -> None:
    job = ZOO["gpt"].job(16, 60, optimizer="adamw", num_samples=16, precision=precision)
    result = train(job, ranks=ranks, device="cuda", out=tmp_path / "run")
    assert result.losses[-1] < 0.9 * result.losses[0]
    cpu = train(job, ranks=1, out=tmp_path / "cpu", steps=3)
    assert torch.tensor(result.losses[:3]).allclose(
        torch.tensor(cpu.losses), rtol=2e-2 if precision == "bf16" else 1e-4
    )


@pytest.mark.parametrize("name", ["resnet_bn", "gpt_dropout"])
def test_compiled_on_the_gpu_equals_one_cpu_process(name: str) -> None:
    job = ZOO[name].job(8, 2, optimizer="adamw", clip_norm=1.0)
    outcome = verify(job, resolve("single", 1, {"compile": "on"}), steps=2, device="cuda")
    assert outcome.ok, outcome.first


def _products(seat: Seat) -> list[float]:
    """How far products in 8 bits on the device are from those that are emulated, by the largest entry."""
    g = torch.Generator().manual_seed(0)
    found = []
    for rows, depth, columns in ((64, 128, 96), (48, 4096, 64)):
        a = torch.randn(rows, depth, generator=g).bfloat16()
        b, bias = (
            torch.randn(columns, depth, generator=g).bfloat16(),
            torch.randn(columns, generator=g).bfloat16(),
        )
        for second, added in ((b.t(), bias), (b.t().contiguous(), None)):
            here = torch.ops.plait.scaled_product(a, second, added)
            there = torch.ops.plait.scaled_product(
                a.cuda(), second.cuda(), None if added is None else added.cuda()
            )
            found.append(float((here - there.cpu()).abs().max() / here.abs().max()))
        factors = (
            torch.randn(depth, rows, generator=g).bfloat16(),
            torch.randn(depth, columns, generator=g).bfloat16(),
        )
        for op in (scaled.SCALED_GRADIENT, scaled.WIDE_GRADIENT):
            here, there = (
                _gradient(op, *(factor.to(device) for factor in factors)) for device in ("cpu", "cuda")
            )
            found.append(float((here - there.cpu()).abs().max() / here.abs().max()))
    return found


def _gradient(op: Any, gradient: torch.Tensor, activation: torch.Tensor) -> torch.Tensor:
    (a, scale_a), (b, scale_b) = (
        scaled.run_transposed_short(gradient),
        scaled.run_transposed_rows(*scaled.rounded_rows(activation)),
    )
    made: torch.Tensor = op(a, b, scale_a, scale_b)
    return made


def _losses(seat: Seat) -> dict[str, list[float]]:
    scaled.pays = lambda *_: True  # in this process alone
    given, losses = ZOO["gpt"].job(16, 60, optimizer="adamw", num_samples=16), {}
    for precision in ("fp32", "fp8"):
        step = parallelize(replace(given, precision=precision), "single", device="cuda")
        batch = step._programs.captures.source.fetch(torch.arange(16))
        losses[precision] = [step(batch) for _ in range(40)]
    return losses


def test_eight_bits_learn_as_fp32_does() -> None:
    (losses,) = launch(_losses, ranks=1)
    assert losses["fp8"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["fp8"] != losses["fp32"]


def test_products_in_eight_bits_are_as_emulated() -> None:
    assert max(launch(_products, ranks=1)[0]) < 2**-6  # sums on the device have fewer bits
