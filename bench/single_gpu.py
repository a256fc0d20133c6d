"""Overhead of plait's `single` over a plain eager loop on one CUDA device, interleaved in one run.

    python -m bench.single_gpu [--repetitions 20] [--loading]

Prints, per model and precision, the ratio plait / eager of the step time: median and quartiles. `--loading`: only a
small convolution net, its whole loop with samples from host memory beside the bare step on a batch that is there (bar:
within 1 %).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from plait.job.job import Job
from plait.options import Changes, Saving
from plait.run.parallelize import parallelize
from plait.run.train import train

Precision = Literal["fp32", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h))).flatten(0, 1)


def flat_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target.flatten())


def gpt_job(precision: Precision) -> Job:
    tokens = torch.randint(0, 8192, (64, 513), generator=torch.Generator().manual_seed(0))
    return Job(
        model=lambda: Gpt(1024, 12, 16, 8192, 512), data=(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        loss=flat_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4), batch=16, steps=1, precision=precision,
    )  # fmt: skip


def conv_job(precision: Precision) -> Job:
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())

    def model() -> nn.Module:
        return nn.Sequential(
            block(3, 64), block(64, 128), nn.MaxPool2d(2), block(128, 256), block(256, 256), nn.MaxPool2d(2),
            block(256, 512), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    g = torch.Generator().manual_seed(0)
    data = (torch.randn(512, 3, 64, 64, generator=g), torch.randint(0, 10, (512,), generator=g))
    return Job(
        model=model, data=data, loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), batch=256, steps=1, precision=precision,
    )  # fmt: skip


def eager_step(
    job: Job, batch: tuple[torch.Tensor, ...], *, compiled: bool = False, short: bool = False
) -> Callable[[], None]:
    """A step as a user would write it, its loss read every time as plait's is; `compiled`: by torch.compile.

    `short`: weights and optimizer state in bfloat16, without masters.
    """
    model = job.build_model().cuda()
    model = model.bfloat16() if short else model
    optimizer = job.build_optimizer(list(model.named_parameters()))
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with job.autocast("cuda"):
            loss = job.objective_of(forward, batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def seconds(step: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def loop_seconds(job: Job, steps: int) -> tuple[float, float]:
    """A step's seconds in whole training loops, data from host memory, every loss read: (plait's, an eager one's)."""
    with tempfile.TemporaryDirectory() as folder:
        result = train(replace(job, steps=steps, epochs=None), device="cuda", out=Path(folder) / "run")
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    ours = statistics.median(line["step_s"] for line in lines[5:])
    model = job.build_model().cuda()
    optimizer = job.build_optimizer(list(model.named_parameters()))
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        ids = torch.randperm(len(job.data[0]), generator=generator)[: job.batch]
        batch = tuple(tensor[ids].cuda() for tensor in job.data)
        optimizer.zero_grad(set_to_none=True)
        with job.autocast("cuda"):
            loss = job.objective_of(model, batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        loss.item()
        times.append(time.perf_counter() - start)
    return ours, statistics.median(times[5:])


def loading(precision: Precision, graphs: str, steps: int = 400) -> None:
    """Print a step's time alone, before and after, and in a whole loop."""
    job = conv_job(precision)
    settings = {"compile": "off", "graphs": graphs}
    batch = tuple(tensor[: job.batch].cuda() for tensor in job.data)
    step = parallelize(job, "single", device="cuda", settings=settings)
    seconds(partial(step, batch), 20)
    bare = [seconds(partial(step, batch), 100) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        made = train(
            replace(job, steps=steps),
            "single",
            device="cuda",
            out=Path(folder) / "run",
            changes=Changes(settings=settings),
            saving=Saving(trace=False),
        )
        lines = [json.loads(line) for line in (made.folder / "metrics.jsonl").read_text().splitlines()]
    whole = statistics.fmean(line["step_s"] for line in lines[50:])
    middle = statistics.median(line["step_s"] for line in lines[50:])
    bare += [seconds(partial(step, batch), 100) for _ in range(3)]
    alone = statistics.median(bare)
    print(
        json.dumps({
            "case": "conv", "precision": precision, "graphs": graphs, "bare_ms": 1e3 * alone,
            "bare_all_ms": [round(1e3 * taken, 3) for taken in bare], "loop_mean_ms": 1e3 * whole,
            "loop_median_ms": 1e3 * middle, "loop_over_bare": whole / alone,
        }),
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--loading", action="store_true")
    options = parser.parse_args()
    repetitions = options.repetitions
    if options.loading:
        for precision in PRECISIONS:
            for graphs in ("off", "auto"):
                loading(precision, graphs)
        return
    for name, make in (("gpt 12x1024", gpt_job), ("conv + batch norm", conv_job)):
        for precision in PRECISIONS:
            job = make(precision)
            batch = tuple(tensor[: job.batch].cuda() for tensor in job.data)
            ours = parallelize(job, "single", device="cuda")
            plain = eager_step(job, batch)
            for _ in range(3):
                ours(batch)
                plain()
            pairs = [(seconds(partial(ours, batch), 5), seconds(plain, 5)) for _ in range(repetitions)]
            low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
            eager_ms = 1e3 * statistics.median(b for _, b in pairs)
            print(
                f"{name:20s} {precision}  eager {eager_ms:7.1f} ms  plait/eager {middle:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )

            ours_s, eager_s = loop_seconds(job, 40)
            print(
                f"{'':20s} {precision}  whole loops: plait {1e3 * ours_s:.1f} ms, eager {1e3 * eager_s:.1f} ms a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
