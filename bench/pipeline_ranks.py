"""One rank of a comparison of pipelines: all systems set up in this process, then timed in turn, block after block.

In: a part (`steps`: real computation beside one process and torch's own pipelines; `slept`: ranks that sleep for as
long as a segment is said to take), a number of repetitions. Out: a JSON file of seconds a step and of how long ranks
waited, written by rank 0. Started by torchrun:

    torchrun --standalone --nproc-per-node 2 -m bench.pipeline_ranks --part steps --out times.json
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bench.models import Block
from bench.steps import interleave
from bench.systems import Steps, join
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.program import instructions as ins
from plait.run.hold.state import ModelState
from plait.run.interpret.machine import Machine
from plait.run.link.between import links_between
from plait.run.link.links import Links
from plait.run.prepare.programs import Programs
from plait.run.setup.allocator import keep_freed_memory

CPU = torch.device("cpu")
MICRO_BATCHES = {"steps": 16, "slept": 8}
LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY = 8, 256, 4, 64, 256
SECONDS = {"forward": 0.01, "b": 0.02, "i": 0.01, "w": 0.01}
"""What a rank that only sleeps takes for a segment; `b` is both of `i` (activations) and `w` (weights)."""
PLANS = ("1f1b", "gpipe", "zero-bubble", "zero-bubble-2", "interleaved", "naive")


class Embeddings(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places


def layers() -> list[nn.Module]:
    """A small GPT, layer by layer: torch's pipelines take slices of it, plait all of it."""
    blocks = [Block(WIDTH, HEADS) for _ in range(LAYERS)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return [Embeddings(), *blocks, head]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Of every token."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def transformer_job(micro_batches: int) -> Job:
    """Micro-batches of two sequences."""
    batch = 2 * micro_batches
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (8 * batch, LENGTH + 1), generator=generator)
    return Job(
        model=lambda: nn.Sequential(*layers()),
        data=list(zip(text[:, :-1], text[:, 1:], strict=True)),
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch=batch,
        accumulate=micro_batches,
        epochs=10**6,
    )


def small_job(micro_batches: int) -> Job:
    """Little to compute: for ranks that sleep instead."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(4 * micro_batches, 32, generator=generator)
    return Job(
        model=lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))),
        data=list(zip(data, data, strict=True)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch=2 * micro_batches,
        accumulate=micro_batches,
        epochs=10**6,
    )


@dataclass(slots=True)
class Waits:
    """An observer that adds up how long a rank waits for others."""

    waited_s: float = 0.0
    total_s: float = 0.0
    """Of all steps."""

    def entering(self, step: int, instruction: ins.Instruction, waiting: bool) -> None:
        pass

    def hopped(self, step: int, hops: object) -> None:
        pass

    def done(self, step: int, instruction: ins.Instruction, start_ns: int, end_ns: int) -> None:
        if isinstance(instruction, ins.Wait):
            self.waited_s += (end_ns - start_ns) / 1e9


def plait_steps(
    job: Job, plan: Plan, rank: int, links: Links | None, stack: ExitStack, *, sleeps: bool = False
) -> tuple[Steps, Waits]:
    """What `run/worker.py` does in a step, without its board and trace; None for links: one process alone."""
    keep_freed_memory()
    programs = Programs(job, open_data(job.data, job.collate), plan, CPU)
    programs.full_step()
    waits = Waits()
    holding = programs.holding(rank, links, CPU) if links is not None else None
    made = links if links is not None else links_between(plan.mesh, 0, CPU, timeout_s=60.0)
    machine = Machine(rank, ModelState(job, CPU, holding=holding), made, waits)
    if sleeps:
        machine._run[ins.Compute] = sleeping(machine)
    source = programs.captures.source
    assert source.num_samples is not None
    loader = Loader(
        source=source, order=job.order(source.num_samples), batch=job.batch, accumulate=job.accumulate,
        rank=plan.data_coordinate(rank), ranks=plan.data_ranks, epochs=job.epochs,
    )  # fmt: skip
    loaded = iter(stack.enter_context(loader))

    def steps(count: int) -> None:
        for _ in range(count):
            step = next(loaded)
            program = programs.for_step(step.micro_batches)
            began = time.perf_counter()
            with torch.no_grad():
                for _ in machine.execute(program, step.step, step.micro_batches):
                    raise AssertionError("a process waits inside its links")
            waits.total_s += time.perf_counter() - began

    return steps, waits


def sleeping(machine: Machine) -> Callable[[Any, Any], None]:
    """A rank that sleeps where it would compute, and goes on with zeros of the right shapes."""

    def compute(now: Any, instruction: ins.Compute) -> None:
        described = now.own.values
        kind, _, number = instruction.segment.split(".")[-1].rpartition("_")
        kind = instruction.segment.split(".")[-2] if kind == "backward" else kind
        if number == "0":  # the first piece of an action takes its time
            time.sleep(SECONDS.get(kind, 0.0))
        for name in instruction.writes:
            value = described[name]
            machine._values[name] = torch.zeros(value.shape, dtype=value.dtype)

    return compute


def torch_steps(schedule: type, job: Job, rank: int, ranks: int) -> Steps:
    """torch.distributed.pipelining, set up as its documentation shows, on equal slices of the same layers."""
    torch.manual_seed(job.seed)
    whole = layers()
    size = LAYERS // ranks
    ends = [0, *(1 + size * stage for stage in range(1, ranks)), len(whole)]
    own = nn.Sequential(*whole[ends[rank] : ends[rank + 1]])
    stage = PipelineStage(own, rank, ranks, CPU)
    pipeline = schedule(stage, n_microbatches=job.accumulate, loss_fn=token_loss)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
    source = open_data(job.data, job.collate)
    assert source.num_samples is not None
    order = job.order(source.num_samples)
    assert order is not None
    number = 0

    def steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            inputs, target = source.fetch(order.at(number).ids)
            number += 1
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                pipeline.step(inputs)
            elif rank == ranks - 1:
                pipeline.step(target=target, losses=[])
            else:
                pipeline.step()
            optimizer.step()

    return steps


def make_systems(
    part: str, rank: int, ranks: int, stack: ExitStack
) -> tuple[dict[str, Steps], dict[str, Waits]]:
    """Everything that is compared; `single` runs on rank 0, while the others wait for it."""
    micro_batches = MICRO_BATCHES[part]
    slept = part == "slept"
    job = small_job(micro_batches) if slept else transformer_job(micro_batches)
    systems: dict[str, Steps] = {}
    waits: dict[str, Waits] = {}
    for name in ("1f1b", "zero-bubble") if slept else PLANS:
        plan = resolve(name, ranks)
        links = links_between(plan.mesh, rank, CPU, timeout_s=60.0)
        systems[name], waits[name] = plait_steps(job, plan, rank, links, stack, sleeps=slept)
    if not slept:
        systems["torch 1F1B"] = torch_steps(Schedule1F1B, job, rank, ranks)
        systems["torch GPipe"] = torch_steps(ScheduleGPipe, job, rank, ranks)
        if rank == 0:
            systems["single"], _ = plait_steps(job, resolve("single", 1), 0, None, stack)
        else:
            systems["single"] = lambda count: None
    return systems, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=sorted(MICRO_BATCHES), required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, ranks = join()
    with ExitStack() as stack:
        systems, waits = make_systems(given.part, rank, ranks, stack)
        for steps in systems.values():
            steps(1)
        dist.barrier()  # `single` runs on one rank: the others would wait for it in the first pipeline
        for entry in waits.values():
            entry.waited_s = entry.total_s = 0.0
        seconds, cpu_seconds = interleave(systems, given.repeats, 1, ranks)
    told: list[Any] = [None] * ranks
    idle = {name: entry.waited_s / entry.total_s for name, entry in waits.items()}
    idle |= {
        name: 1 - sum(cpu_seconds[name]) / sum(seconds[name]) for name in systems if name.startswith("torch")
    }
    dist.all_gather_object(told, idle)
    if rank == 0:
        load = os.getloadavg()[0]
        shares = {name: sum(entry[name] for entry in told) / ranks for name in idle}
        found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "idle": shares, "load": [load, load]}
        given.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
