"""GELU in fewer instructions: every number that 16 bits have, and what is left to torch."""

import pytest
import torch
from torch.nn import functional as F

from plait.graph.ops.gelu import DECOMPOSITIONS
from plait.torch_private.inductor import _or

aten = torch.ops.aten
GELU, BACKWARD = DECOMPOSITIONS[aten.gelu.default], DECOMPOSITIONS[aten.gelu_backward.default]


def every(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_is_at_least_as_exact_as_torch(dtype: torch.dtype) -> None:
    x = every(dtype)
    exact = F.gelu(x.double()).to(dtype)
    ours, theirs = GELU(x), F.gelu(x)
    assert ours.dtype == dtype and ours.isfinite().all()
    assert (ours != exact).sum() <= (theirs != exact).sum()
    wide = x.double().requires_grad_()
    F.gelu(wide).sum().backward()
    assert wide.grad is not None
    found, torchs = (op(torch.ones_like(x), x).double() for op in (BACKWARD, aten.gelu_backward.default))
    seen = wide.grad.isfinite()
    worst = (torchs - wide.grad)[seen].abs().max()
    assert (found - wide.grad)[seen].abs().max() <= worst * (1 + 1e-6)
    odd = torch.tensor([float("nan"), -0.0], dtype=dtype)
    assert GELU(odd)[0].isnan() and torch.signbit(GELU(odd)[1])


def test_leaves_the_rest_to_torch() -> None:
    x = torch.randn(4)
    assert GELU(x) is NotImplemented and BACKWARD(x, x) is NotImplemented
    assert GELU(x.bfloat16(), approximate="tanh") is NotImplemented
    assert BACKWARD(x, x.bfloat16()) is NotImplemented
    either = _or(GELU, lambda *args, **kwargs: "torch")
    assert either(x) == "torch"
    assert isinstance(either(x.bfloat16()), torch.Tensor)
