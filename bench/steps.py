"""One rank of a comparison: all systems set up in this process, then timed in turn, block after block.

In: a case, specifications of systems, a number of repetitions. Out: a JSON file of seconds a step, by system and
repetition, written by rank 0. Started by torchrun, or alone for one process:

    torchrun --standalone --nproc-per-node 2 -m bench.steps --case mlp --systems plait ddp --out times.json
"""

import argparse
import json
import os
import time
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.models import CASES
from bench.systems import Steps, join, make_system

Times = dict[str, list[float]]
"""Seconds a step, by system and repetition."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--systems", nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(given.threads)
    rank, ranks = join()
    case = CASES[given.case]
    job = case.job()
    if ranks == 1:
        job = replace(job, batch=case.single_batch)
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        systems = {name: make_system(name, job, rank, ranks, stack) for name in given.systems}
        seconds, cpu_seconds = interleave(systems, given.repeats, case.block, ranks)
    if rank == 0:
        found: dict[str, Any] = {
            "case": given.case,
            "ranks": ranks,
            "threads": given.threads,
            "block": case.block,
        }
        found |= {"load": [load, os.getloadavg()[0]], "seconds": seconds, "cpu_seconds": cpu_seconds}
        given.out.write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def interleave(systems: dict[str, Steps], repeats: int, block: int, ranks: int) -> tuple[Times, Times]:
    """Seconds a step of every system in every repetition, by the wall and by this process's share of the processors.

    The order of systems turns by one from repetition to repetition.
    """
    for steps in systems.values():
        steps(3)  # allocations, oneDNN's primitives, the rebuilding of DDP's buckets
    if ranks > 1:
        dist.barrier()  # what one rank alone has done must not be another's wait in what comes next
    seconds: Times = {name: [] for name in systems}
    cpu_seconds: Times = {name: [] for name in systems}
    names = list(systems)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            systems[name](1)  # the caches are another system's
            if ranks > 1:
                dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            systems[name](block)
            if ranks > 1:
                dist.barrier()
            seconds[name].append((time.perf_counter() - start) / block)
            cpu_seconds[name].append((time.process_time() - cpu_start) / block)
    return seconds, cpu_seconds


if __name__ == "__main__":
    main()
