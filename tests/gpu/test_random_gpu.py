"""The random ops on CUDA give the numbers of the CPU."""

from typing import Any

import pytest
import torch

from plait.graph.ops import random as random_ops
from plait.graph.ops.random import IMPLEMENTATIONS, random_key

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SHAPES = [
    ((7, 33), 0, 1),
    ((35, 64), 0, 5),
    ((3, 7, 5, 4), 1, 1),
    ((7,), 0, 1),
    ((4, 3, 300, 301), 0, 1),
    ((6, 5), -1, 1),
]
EXACT: dict[str, tuple[Any, ...]] = {
    "bernoulli": (torch.float32, 0.3),
    "uniform": (torch.float32, 0.0, 1.0),
    "randint": (torch.int64, -3, 1000),
}


@pytest.mark.parametrize(("shape", "batch_dim", "rows_per_sample"), SHAPES)
@pytest.mark.parametrize("name", EXACT)
def test_bit_equal_to_cpu(name: str, shape: tuple[int, ...], batch_dim: int, rows_per_sample: int) -> None:
    results = []
    for device in ("cpu", "cuda"):
        key = random_key(seed=1, step=2, first_sample=5, device=device)
        op = getattr(torch.ops.plait, name).default
        placement = {"batch_dim": batch_dim, "rows_per_sample": rows_per_sample}
        results.append(op(key, 3, list(shape), *EXACT[name], **placement).cpu())
        assert torch.equal(results[-1], IMPLEMENTATIONS[op](key, 3, shape, *EXACT[name], **placement).cpu())
    assert torch.equal(*results)


def test_slices_are_bit_equal_to_cpu() -> None:
    options: dict[str, Any] = {"full": (4, 300, 500), "start": (0, 2, 3), "batch_dim": 0}
    cpu, cuda = (
        random_ops.bernoulli(
            random_key(seed=1, step=2, device=device), 3, (4, 7, 9), torch.bool, 0.5, **options
        ).cpu()
        for device in ("cpu", "cuda")
    )
    assert torch.equal(cpu, cuda)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_is_close_to_cpu(dtype: torch.dtype) -> None:
    """The devices' erfinv differ by roundings, more in the tails."""
    cpu, cuda = (
        random_ops.normal(
            random_key(seed=1, step=2, device=device), 3, (257, 129), dtype, 0.0, 1.0, batch_dim=0
        ).cpu()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(cpu, cuda, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*EXACT, "normal"])
def test_shares_concatenate_to_the_whole(name: str) -> None:
    parameters = EXACT.get(name, (torch.float32, 0.0, 1.0))
    function = getattr(random_ops, name)
    whole = function(random_key(seed=1, step=2, device="cuda"), 3, (7, 1001), *parameters, batch_dim=0)
    first = function(random_key(seed=1, step=2, device="cuda"), 3, (3, 1001), *parameters, batch_dim=0)
    key = random_key(seed=1, step=2, first_sample=3, device="cuda")
    assert torch.equal(torch.cat([first, function(key, 3, (4, 1001), *parameters, batch_dim=0)]), whole)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_does_not_wait_for_the_device() -> None:
    key = random_key(seed=1, step=2, device="cuda")
    random_ops.bernoulli(key, 3, (64, 64), torch.float32, 0.5, batch_dim=0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        random_ops.bernoulli(key, 4, (64, 64), torch.float32, 0.5, batch_dim=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
