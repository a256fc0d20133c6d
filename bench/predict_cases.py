"""What `bench.predict` predicts and measures: four models under six plans on processors, seven jobs on one GPU.

In: a name. Out: a `Job` with the settings of its plan. The models of the GPU start from repeated random blocks, because
drawing billions of numbers takes longer than the measurement.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.models import CASES
from plait.job.job import Job
from plait.job.paper.job import build, paper_job
from plait.job.paper.shapes import read_shape

PLANS = ("single", "ddp", "zero3", "megatron", "gpipe", "1f1b")
MODELS = ("mlp", "conv", "gpt", "resnet")
MICRO_BATCHES = 4
"""Of pipelines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One row of the table."""

    model: str
    plan: str
    ranks: int
    device: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people and for the command line."""
        return f"{self.model}/{self.plan}"

    def job(self) -> Job:
        """What is trained."""
        if self.device == "cuda":
            return GPU_JOBS[self.model]()
        job = CASES[self.model].job()
        pipelined = self.plan in ("gpipe", "1f1b")
        columns = tuple(torch.stack(column) for column in zip(*job.data, strict=True))
        return replace(job, data=columns, batch=2 * job.batch, accumulate=MICRO_BATCHES if pipelined else 1)


def processor_entries(models: tuple[str, ...], plans: tuple[str, ...], ranks: int) -> list[Entry]:
    """Every model under every plan."""
    return [
        Entry(model=model, plan=plan, ranks=1 if plan == "single" else ranks, device="cpu")
        for model in models
        for plan in plans
    ]


def gpu_entries() -> list[Entry]:
    """One GPU, with and without recomputation."""
    plain = [Entry(model=model, plan="single", ranks=1, device="cuda") for model in GPU_JOBS]
    full = {"memory": {"recompute": "full"}}
    again = [
        Entry(model=model, plan="recompute", ranks=1, device="cuda", settings=full)
        for model in ("gpt-1b", "gpt-3b")
    ]
    return plain + again


def _cheap(make: Callable[[], nn.Module]) -> nn.Module:
    """A model whose weights repeat one block of random numbers."""
    with torch.device("meta"):
        model = make()
    model = model.to_empty(device="cpu")
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            times = -(-parameter.numel() // block.numel())
            parameter.copy_(block.repeat(times)[: parameter.numel()].view(parameter.shape))
        for buffer in model.buffers():
            buffer.fill_(1)
    return model


def _paper(text: str, batch: int) -> Job:
    job = paper_job(text, batch=batch, steps=1)
    return replace(job, model=partial(_cheap, partial(build, read_shape(text))), precision="bf16")


def _mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(512, 4096), nn.GELU()]
    for _ in range(8):
        layers += [nn.Linear(4096, 4096), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1024))


def _mlp_job() -> Job:
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(8192, 512, generator=generator),
        torch.randint(1024, (8192,), generator=generator),
    )
    return Job(
        model=partial(_cheap, _mlp), data=data, loss=F.cross_entropy, batch=8192, steps=1, precision="bf16",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
    )  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, seq: int, batch: int) -> Job:
    text = f"gpt:layers={layers},hidden={hidden},heads={heads},seq={seq},vocab=50304,tied=false"
    return _paper(text, batch)


GPU_JOBS: Mapping[str, Callable[[], Job]] = {
    "mlp": _mlp_job,
    "resnet50": partial(_paper, "resnet50", 128),
    "gpt-0.1b": partial(_gpt, 12, 768, 12, 1024, 16),
    "gpt-1b": partial(_gpt, 24, 2048, 16, 1024, 8),
    "gpt-3b": partial(_gpt, 32, 2560, 32, 2048, 4),
}
"""By name."""
