"""Rates of one device: matrix products by size, memory, the cost of an op that does nothing.

In: a device. Out: seconds, as measured. Several ranks measure at once when each calls this between the same barriers;
on a GPU, work is queued behind a pause so that the host does not slow it down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from plait.torch_private import cuda

_PAUSE_CYCLES = 100_000_000
"""About 50 ms of a GPU's clock: longer than the host needs to queue what is timed."""

_PINNED = 256 << 20
"""Bytes that are copied to learn the rate of the bus."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one rank found."""

    products: dict[str, dict[str, float]]
    """FLOP/s by dtype and by the extent of square matrices, as text: results of ranks travel as JSON."""
    copy_rate: float
    """Bytes per second read and written by a copy of a large tensor."""
    attention_rate: float
    """FLOP/s of fused attention, forward."""
    small_op_s: float
    """Device time of an op on one number."""
    host_s: float
    """Host time of an op on one number; 0 on a processor, where it is the same."""
    probe_s: list[float]
    """Times of one product, again and again: how quiet the machine is."""


def measure_rates(device: torch.device, meet: Callable[[], None] = lambda: None) -> Rates:
    """Measure one device; takes about two seconds."""
    on_gpu = device.type == "cuda"
    extents = (256, 512, 1024, 2048, 4096, 8192) if on_gpu else (128, 256, 384, 512, 768)
    dtypes = (torch.float32, torch.bfloat16) if on_gpu else (torch.float32, torch.float64)
    products: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        found = products.setdefault(str(dtype).removeprefix("torch."), {})
        for extent in extents:
            left, right = (torch.randn(extent, extent, device=device).to(dtype) for _ in range(2))
            meet()
            found[str(extent)] = 2.0 * extent**3 / _seconds(lambda a=left, b=right: torch.mm(a, b), device)  # type: ignore[misc]
    count = (1 << 28) if on_gpu else (1 << 23)
    source, target = torch.ones(count, device=device), torch.ones(count, device=device)
    meet()
    copy_rate = 2.0 * 4 * count / _seconds(lambda: target.copy_(source), device)
    one = torch.ones(1, device=device)
    meet()
    small_op_s = _seconds(lambda: one.add(1.0), device, repeats=200)
    probe = torch.randn(512, 512, device=device)
    probes = [_seconds(lambda: torch.mm(probe, probe), device, repeats=1, rounds=1) for _ in range(40)]
    return Rates(
        products=products,
        copy_rate=copy_rate,
        attention_rate=_attention(device, meet),
        small_op_s=small_op_s,
        host_s=_host_seconds(lambda: one.add(1.0)) if on_gpu else 0.0,
        probe_s=probes[5:],
    )


def _attention(device: torch.device, meet: Callable[[], None]) -> float:
    on_gpu = device.type == "cuda"
    batch, heads, length, width = (8, 16, 2048, 128) if on_gpu else (1, 8, 256, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    query = torch.randn(batch, heads, length, width, device=device).to(dtype)
    meet()
    seconds = _seconds(lambda: F.scaled_dot_product_attention(query, query, query), device)
    return 4.0 * batch * heads * length * length * width / seconds


def _seconds(function: Callable[[], Any], device: torch.device, repeats: int = 0, rounds: int = 5) -> float:
    """Seconds of one call: the median of several rounds of calls."""
    function()
    if not repeats:
        began = time.perf_counter()
        function()
        _finish(device)
        repeats = max(2, min(50, int(0.02 / max(time.perf_counter() - began, 1e-6))))
    return median(_round(function, device, repeats) for _ in range(rounds))


def _round(function: Callable[[], Any], device: torch.device, repeats: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - began) / repeats
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cuda.sleep(_PAUSE_CYCLES)
    first.record()
    for _ in range(repeats):
        function()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) * 1e-3 / repeats


def _host_seconds(function: Callable[[], Any]) -> float:
    cuda.sleep(_PAUSE_CYCLES)
    began = time.perf_counter()
    for _ in range(200):
        function()
    seconds = (time.perf_counter() - began) / 200
    torch.cuda.synchronize()
    return seconds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_host_bandwidth() -> float:
    """Bytes per second from pinned memory to the current CUDA device."""
    there = torch.empty(_PINNED, dtype=torch.uint8, pin_memory=True)
    here = there.cuda()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        here.copy_(there, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return _PINNED / min(times)
