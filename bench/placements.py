"""How long the choice of tensor placements takes, and what it costs beside Megatron's pattern.

In: nothing. Out: a table of seconds, bytes, collectives and memory of the pattern and of the search, on a GPT of 24
layers and on GPT-3's shape (96 layers), beside the limits of 20 s and 60 s; exits 1 where one is broken, where the
search sends more than the pattern in the same memory, or where the pattern needs more than 4 all-reduces a layer. Time
is processor time of this process on one core, capture not counted. Nothing of the models is allocated.

    python -m bench.placements [--models gpt-24 gpt3-96] [--ranks 8]
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.capture import GPT, gpt3_175b, token_loss
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.plan.tensor import megatron, tensor
from plait.program.place.place import place
from plait.search.place.cost import Cost, flow_cost
from plait.search.place.flow import Flow
from plait.search.place.resolve import resolve_placements
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model and its bar."""

    job: Callable[[], Job]
    num_layers: int
    limit_s: float


def gpt_24() -> Job:
    """GPT-2 medium's shape, four sequences of 1,024 tokens a step."""
    sample = (torch.zeros(1024, dtype=torch.int64), torch.zeros(1024, dtype=torch.int64))
    return Job(
        model=lambda: GPT(24, 1024, 16, 1024, 50304),
        data=[sample],
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        batch=4,
        steps=1,
    )


MODELS = {
    "gpt-24": Model(job=gpt_24, num_layers=24, limit_s=20.0),
    "gpt3-96": Model(job=gpt3_175b, num_layers=96, limit_s=60.0),
}


def measure(model: Model, ranks: int) -> bool:
    """Print one model's rows; whether it keeps to its bars."""
    start = time.perf_counter()
    job = model.job()
    graph = Captures(job).of_size(job.batch)
    print(f"  captured in {time.perf_counter() - start:.1f} s, not counted")
    pattern, _ = choose("pattern", graph, megatron(ranks))
    found, taken_s = choose("search", graph, tensor(ranks))
    reduces = pattern.collectives.get("all_reduce", 0)
    checks = {
        f"at most {model.limit_s:.0f} s": taken_s <= model.limit_s,
        "no more bytes than the pattern": found.num_bytes <= pattern.num_bytes * 1.000001,
        "no more memory than the pattern": found.memory_bytes <= pattern.memory_bytes * 1.000001,
        "pattern: 4 all-reduces a layer": reduces <= 4 * model.num_layers + 2,
    }
    for check, holds in checks.items():
        print(f"    {'ok    ' if holds else 'BROKEN'} {check}")
    return all(checks.values())


def choose(name: str, graph: Graph, plan: Plan) -> tuple[Cost, float]:
    """Resolve a plan, print what it costs as it will be compiled, and give that and the seconds."""
    start_s = time.process_time()
    resolved, notices = resolve_placements(graph, plan)
    seconds = time.process_time() - start_s
    placed = {p.axis.name: p for p in place(graph, resolved, (graph.num_samples,))}
    cost = flow_cost(Flow(graph, placed["tensor"].axis), placed["tensor"])
    collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(cost.collectives.items()))
    print(
        f"  {name:8} {seconds:7.1f} s {format_bytes(cost.num_bytes):>11} sent "
        f"{format_bytes(cost.memory_bytes):>11} held {cost.flops:10.3e} FLOP  {collectives}"
    )
    for notice in notices:
        print(f"    {notice}")
    return cost, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    for name in arguments.models:
        print(f"{name} on tensor={arguments.ranks}")
        good &= measure(MODELS[name], arguments.ranks)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
