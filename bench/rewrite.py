"""Training steps with and without rewriting, in one run: `python -m bench.rewrite [--device cuda] [--compile]`.

In: graphs in which something can be merged or reordered, and the models of the tests, in which little can. Out: a table
of seconds a step, the ratio of both, ops, and what `rewrite=auto` decides. The two ways take turns, step by step, so
that other work on the machine meets both alike; the smallest of many is what counts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from plait import parallelize
from plait.job.job import Job

_BAR = 0.9
"""Of the time without."""
_WORST = 1.02
"""Of the time without, on models in which nothing is to be gained."""


class Attention(nn.Module):
    """Separate Q, K, V."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int = 48, hidden: int = 32) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Inception(nn.Module):
    """Four branches of 1 x 1 convolutions, two of which go on."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        quarter = width // 4
        self.branches = nn.ModuleList(nn.Conv2d(width, quarter, 1) for _ in range(4))
        self.third = nn.Conv2d(quarter, quarter, 3, padding=1)
        self.fifth = nn.Conv2d(quarter, quarter, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = (F.relu(branch(x)) for branch in self.branches)
        return x + torch.cat([first, second, self.third(third), self.fifth(fourth)], 1)


class Squeeze(nn.Module):
    """SqueezeNet's fire: one narrow convolution, two wide ones on its result."""

    def __init__(self, width: int = 32, narrow: int = 8) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(width, narrow, 1, bias=False)
        self.one = nn.Conv2d(narrow, width // 2, 1, bias=False)
        self.nine = nn.Conv2d(narrow, width // 2, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = F.relu(self.squeeze(x))
        return x + F.relu(torch.cat([self.one(narrow), self.nine(narrow)], 1))


class Adapters(nn.Module):
    """A frozen weight with low-rank adapters, added up as weights."""

    def __init__(self, width: int = 256, rank: int = 4, count: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width, requires_grad=False)
        self.downs = nn.ParameterList(torch.randn(rank, width) / width for _ in range(count))
        self.ups = nn.ParameterList(torch.randn(width, rank) / width for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for down, up in zip(self.downs, self.ups, strict=True):
            weight = weight + up @ down
        return x + F.linear(x, weight)


class Recommender(nn.Module):
    """Many small towers on one input."""

    def __init__(self, width: int = 64, towers: int = 12, hidden: int = 8) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(width, hidden) for _ in range(towers))
        self.last = nn.Linear(towers * hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([F.relu(tower(x)) for tower in self.towers], 1))


class Plain(nn.Module):
    """A perceptron, in which there is nothing to merge."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Images(nn.Module):
    """Convolutions one after the other, with batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model."""

    block: Callable[[], nn.Module]
    count: int
    """Blocks one after the other."""
    shape: tuple[int, ...]
    """Of a sample, in and out."""
    batch: int
    gains: bool
    """Whether there is something to merge."""

    def job(self) -> Job:
        """Training towards random numbers."""
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(self.batch, *self.shape, generator=generator) for _ in range(2))
        return Job(
            model=self._model, data=TensorDataset(x, y), objective=_squares, batch=self.batch, steps=100_000,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        )  # fmt: skip

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(self.block() for _ in range(self.count)))


def _squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


CASES = {
    "Q, K, V": Case(block=Attention, count=4, shape=(8, 64), batch=4, gains=True),
    "gated MLP": Case(block=Gated, count=4, shape=(48,), batch=32, gains=True),
    "inception": Case(block=Inception, count=3, shape=(32, 8, 8), batch=4, gains=True),
    "squeeze": Case(block=Squeeze, count=3, shape=(32, 8, 8), batch=4, gains=True),
    "adapters": Case(block=Adapters, count=3, shape=(256,), batch=16, gains=True),
    "recommender": Case(block=Recommender, count=2, shape=(64,), batch=32, gains=True),
    "perceptron": Case(block=Plain, count=3, shape=(64,), batch=64, gains=False),
    "images": Case(block=Images, count=3, shape=(32, 8, 8), batch=4, gains=False),
}
"""By name."""


def measure(case: Case, device: str, steps: int, *, compiled: bool) -> tuple[float, float, str]:
    """Seconds a step without and with rewriting, and what was told of it."""
    job, told = case.job(), list[str]()

    def listen(event: dict[str, Any]) -> None:
        told.extend(event.get("notices", []))

    common = {"compile": "on" if compiled else "off"}
    ways = [
        parallelize(job, "single", device=device, settings={**common, "rewrite": way}, listener=listen)
        for way in ("off", "auto")
    ]
    data: Any = job.data
    batch = data[:]
    best = [float("inf")] * 2
    for number in range(steps):
        for index, step in enumerate(ways):
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step(batch)
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 2:
                best[index] = min(best[index], time.perf_counter() - began)
    line = next((text for text in told if text.startswith("rewrite:")), "left as it is")
    return best[0], best[1], line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true", help="segments compiled, with and without")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    good, bad = 0, []
    for name in given.only:
        case = replace(CASES[name])
        without, with_it, line = measure(case, given.device, given.steps, compiled=given.compile)
        ratio = with_it / without
        good += case.gains and ratio <= _BAR
        if ratio > _WORST:
            bad.append(name)
        print(
            f"{name:12} {without * 1e3:8.3f} ms -> {with_it * 1e3:8.3f} ms  {ratio:5.2f}x  {line}", flush=True
        )
    print(f"{good} at most {_BAR}x of the time without; over {_WORST}x: {', '.join(bad) or 'none'}")
    return 0 if good >= min(4, len(given.only)) and not bad else 1


if __name__ == "__main__":
    raise SystemExit(main())
