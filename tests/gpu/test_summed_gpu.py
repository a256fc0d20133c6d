"""Gradients with the sums of their columns in one pass: the kernels against what torch computes on a processor."""

from pathlib import Path

import pytest
import torch

from plait.graph.ops import scaled
from plait.graph.ops.summed import GELU_GRADIENT, HEADS_BESIDE, NORM_GRADIENT, has_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no CUDA device"),
    pytest.mark.timeout(180),
]
SHAPES = ((1, 16), (7, 48), (130, 1030), (5000, 2048), (600, 8192))
"""Less than a tile, whole ones and a rest; more rows than programs."""


def close(found: torch.Tensor, expected: torch.Tensor, bound: float = 2**-7) -> None:
    """Up to a unit of 16 bits, and sums of them up to what such units add up to."""
    assert found.dtype == expected.dtype and found.shape == expected.shape and found.is_cuda
    wanted = expected.float()
    assert (found.cpu().float() - wanted).norm() <= bound * wanted.norm()


def test_the_kernels_can_be_built() -> None:
    assert has_kernels()


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu(shape: tuple[int, int]) -> None:
    grad, x = torch.randn(shape).bfloat16(), (2 * torch.randn(shape)).bfloat16()
    for found, expected in zip(GELU_GRADIENT(grad.cuda(), x.cuda()), GELU_GRADIENT(grad, x), strict=True):
        close(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["float32", "rounded", "bfloat16", "alone", "plain"])
def test_norm(shape: tuple[int, int], kind: str) -> None:
    short = torch.bfloat16
    dtype = short if kind == "bfloat16" else torch.float32
    grad, x = torch.randn(shape).bfloat16(), torch.randn(shape).to(dtype)
    mean, variance = x.float().mean(1), x.float().var(1, unbiased=False)
    weight = None if kind == "plain" else torch.randn(shape[1])
    added = None if kind == "alone" else torch.randn(shape).to(dtype)
    given = (grad, x, mean, (variance + 1e-5).rsqrt(), weight, added)
    there = [None if entry is None else entry.cuda() for entry in given]
    total, rounded, sums = NORM_GRADIENT(*there, dtype, short)
    expected = NORM_GRADIENT(*given, dtype, short)
    close(total, expected[0], 1e-5 if dtype == torch.float32 else 2**-7)
    close(rounded, expected[1])
    close(sums[:2], expected[2][:2], 1e-5)
    close(sums[2], expected[2][2])


def test_heads() -> None:
    turned = torch.randn(2, 70, 3, 24).bfloat16().transpose(1, 2)
    sources = [turned, torch.randn(2, 3, 70, 24).bfloat16(), torch.randn(2, 3, 70, 24).bfloat16()]
    found = HEADS_BESIDE([source.cuda() for source in sources])
    expected = HEADS_BESIDE(sources)
    assert torch.equal(found[0].cpu(), expected[0])
    close(found[1], expected[1])


@pytest.mark.parametrize("shape", [(16, 16), (208, 80), (1024, 2048)])
def test_rows_in_eight_bits_are_turned(shape: tuple[int, int]) -> None:
    rows, scale = scaled.rounded_rows((torch.randn(shape) * torch.randn(shape[0], 1).exp()).bfloat16())
    turned, one = scaled.transposed_rows(rows.cuda(), scale.cuda())
    expected, same = scaled.transposed_rows(rows, scale)
    assert torch.equal(turned.cpu().float(), expected.float()) and torch.equal(one.cpu(), same)
    gradient = torch.randn(shape).bfloat16()
    found, _ = scaled.transposed_short(gradient.cuda())
    assert torch.equal(found.cpu().float(), scaled.transposed_short(gradient)[0].float())
