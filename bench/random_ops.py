"""How long plait's random ops take beside torch's own.

    python bench/random_ops.py [--threads N] [--device cpu|cuda] [--repeats N]

Both write a fresh float32 tensor of the same shape, in turns; the median of the repeats is shown, in nanoseconds an
element, and the ratio of the medians (under 1: plait is faster).
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plait.graph.ops import random as random_ops
from plait.graph.ops.random import random_key

SHAPES = [(32, 128), (64, 1024), (4096, 64), (8, 12, 128, 128), (1, 1 << 20), (32, 128, 768)]


def pairs(
    shape: tuple[int, ...], device: str
) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    key = random_key(seed=1, step=2, device=device)
    kind = torch.float32
    return {
        "bernoulli": (
            lambda: torch.empty(shape, device=device).bernoulli_(0.9),
            lambda: random_ops.bernoulli(key, 0, shape, kind, 0.9, batch_dim=0),
        ),
        "uniform": (
            lambda: torch.empty(shape, device=device).uniform_(),
            lambda: random_ops.uniform(key, 0, shape, kind, 0.0, 1.0, batch_dim=0),
        ),
        "normal": (
            lambda: torch.empty(shape, device=device).normal_(),
            lambda: random_ops.normal(key, 0, shape, kind, 0.0, 1.0, batch_dim=0),
        ),
    }


def seconds(function: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), ns an element")
    print(f"{'shape':>20} {'op':>10} {'torch':>8} {'plait':>8} {'ratio':>6}")
    for shape in SHAPES:
        for name, functions in pairs(shape, arguments.device).items():
            times: tuple[list[float], list[float]] = ([], [])
            for repeat in range(arguments.repeats + 1):
                for function, record in zip(functions, times, strict=True):
                    elapsed = seconds(function, arguments.device)
                    if repeat > 0:
                        record.append(elapsed)
            torch_s, plait_s = (statistics.median(record) for record in times)
            scale = 1e9 / math.prod(shape)
            label = "x".join(map(str, shape))
            print(
                f"{label:>20} {name:>10} {torch_s * scale:8.2f} {plait_s * scale:8.2f} {plait_s / torch_s:6.2f}"
            )


if __name__ == "__main__":
    main()
