"""How long capture takes, and how much memory: GPT-3's 175B shape, and a small MLP after the imports.

In: nothing (or `--layers N` for a shorter GPT). Out: a table of seconds by pass and the peak resident memory of this
process, beside the limits of 60 s and 2 GB; exits 1 where one is broken. Nothing of the model is allocated.

    python -m bench.capture [--layers 96]
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.graph.capture import capture as capture_module
from plait.graph.from_job import Captures
from plait.graph.show.summary import summarize
from plait.job.job import Job
from plait.units import format_bytes, format_count, format_flops

LIMIT_S, LIMIT_BYTES = 60.0, 2 * 10**9


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            t.view(n, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, num_heads)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A plain decoder; nothing in it knows of plait."""

    def __init__(self, num_layers: int, width: int, num_heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def gpt3_175b(num_layers: int = 96) -> Job:
    """Brown et al. 2020, table 2.1, with the vocabulary padded to 51,200; one sequence of 2,048 tokens a step."""
    length, vocabulary = 2048, 51200
    sample = (torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64))
    return Job(
        model=lambda: GPT(num_layers, 12288, 96, length, vocabulary),
        data=[sample],
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=6e-5),
        batch=1,
        steps=1,
    )


def small_mlp() -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        data=[(torch.zeros(64), torch.zeros((), dtype=torch.int64))],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=1,
        steps=1,
    )


PASSES = {
    "build the model": (capture_module, "fake_model"),
    "trace forward and backward": (capture_module, "trace_steady"),
    "remove writes in place": (capture_module, "functionalize"),
    "clean": (capture_module, "clean"),
}
"""What each pass is called here, and the function that does it."""


@contextmanager
def timed_passes(seconds: dict[str, float]) -> Iterator[None]:
    """Add up the time spent in each pass."""
    patches = []
    for name, (module, function) in PASSES.items():
        original = getattr(module, function)

        def timed(
            *args: Any, original: Callable[..., Any] = original, name: str = name, **kwargs: Any
        ) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        patches.append(mock.patch.object(module, function, timed))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=96)
    layers: int = parser.parse_args().layers

    start = time.perf_counter()
    Captures(small_mlp()).of_size(8)
    first_s = time.perf_counter() - start
    warm = []
    for size in range(9, 19):
        captures = Captures(small_mlp())
        start = time.process_time()
        captures.of_size(size)
        warm.append(time.process_time() - start)
    print(f"MLP, first capture in a process (torch's own imports)  {first_s * 1e3:8.0f} ms")
    print(
        f"MLP, later captures, CPU time, median of {len(warm)}          {sorted(warm)[len(warm) // 2] * 1e3:8.0f} ms"
    )

    seconds: dict[str, float] = {}
    base = peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    with timed_passes(seconds):
        graph = Captures(gpt3_175b(layers)).of_size(1)
    total_s, cpu_s, peak = time.perf_counter() - start, time.process_time() - start_cpu, peak_bytes()
    start = time.perf_counter()
    summary = summarize(graph)
    summary_s = time.perf_counter() - start
    print(
        f"GPT, {layers} layers: {format_count(summary.num_parameters)} parameters, "
        f"{summary.num_ops['forward']:,} + {summary.num_ops['backward']:,} ops, "
        f"{format_flops(summary.forward_flops)} forward, {format_flops(summary.backward_flops)} backward"
    )
    for name, taken in seconds.items():
        print(f"  {name:36} {taken:8.2f} s")
    print(f"  {'summarize (not in the capture)':36} {summary_s:8.2f} s")
    print(f"capture {total_s:.1f} s, {cpu_s:.1f} s of CPU time (limit {LIMIT_S:.0f} s)")
    print(f"peak memory {format_bytes(peak)}, {format_bytes(base)} before (limit {LIMIT_BYTES / 1e9:.0f} GB)")
    return 0 if total_s < LIMIT_S and peak < LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
