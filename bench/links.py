"""plait_shm beside gloo, in the same processes at the same time: collectives by size, torch's DDP, random collectives.

    python -m bench.links                    ratios, at 2 and 4 ranks, with the bars that they must reach
    python -m bench.links --mixed 10000      random collectives that must equal gloo's

Turns alternate, so that what else the machine does falls on both. Exits 1 where a bar is missed or a result differs.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.link.mixed_collectives import differences
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait.shm
from plait.run.link.shm.core import compiled
from plait.run.start.launch import Seat, launch

SIZES = ((1 << 10, 200, 5.0, 5.0), (1 << 20, 40, 3.0, 3.0), (64 << 20, 7, 1.5, 4.0))
"""Bytes, turns, how many times faster than gloo an all-reduce must be, and where the tensor is in shared memory."""
DDP_BAR = 1.3
"""How many times faster a step of torch's DDP must be on plait_shm, where communication bounds it."""
_DDP_TURNS = 12


def _begin(seat: Seat, folder: Path) -> Any:
    store = dist.FileStore(str(folder / "store"), seat.ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=seat.rank, world_size=seat.ranks, timeout=timedelta(seconds=120)
    )
    return dist.new_group(backend=plait.shm.BACKEND)


def _alternate(runs: dict[str, Callable[[], None]], turns: int, group: Any) -> dict[str, float]:
    """Median seconds of each, one after another in every turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 1):
        for name, run in runs.items():
            dist.barrier(group=group)
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: median(found[1:]) for name, found in times.items()}


def _collectives(seat: Seat, folder: Path) -> list[tuple[str, float, float, float]]:
    """(what, gloo's seconds, ours, bar)."""
    shm = _begin(seat, folder)
    rows = []
    for size, turns, bar, placed_bar in SIZES:
        count = size // 4
        own, placed = torch.zeros(count), plait.shm.empty((count,), group=shm)
        placed.zero_()
        found = _alternate(
            {
                "gloo": partial(dist.all_reduce, torch.zeros(count)),
                "shm": partial(dist.all_reduce, own, group=shm),
                "placed": partial(dist.all_reduce, placed, group=shm),
            },
            turns,
            shm,
        )
        rows.append((f"all_reduce {_size(size)}", found["gloo"], found["shm"], bar))
        rows.append(
            (f"all_reduce {_size(size)} in shared memory", found["gloo"], found["placed"], placed_bar)
        )
    dist.destroy_process_group()
    return rows


def _ddp(seat: Seat, folder: Path) -> list[tuple[str, float, float, float]]:
    """A model of many weights and few samples."""
    shm = _begin(seat, folder)

    def made(group: Any) -> Callable[[], None]:
        torch.manual_seed(0)
        layers = [nn.Linear(1024, 1024) for _ in range(8)]
        model = DistributedDataParallel(
            nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.randn(4, 1024)

        def step() -> None:
            optimizer.zero_grad(set_to_none=False)
            model(data).square().mean().backward()
            optimizer.step()

        return step

    steps = {"gloo": made(dist.group.WORLD), "shm": made(shm)}
    found = _alternate(steps, _DDP_TURNS, shm)
    dist.destroy_process_group()
    return [("torch DDP, 8 x Linear(1024)", found["gloo"], found["shm"], DDP_BAR)]


def _mixed(seat: Seat, folder: Path, count: int, seed: int) -> list[str]:
    _begin(seat, folder)
    groups = [list(range(seat.ranks)), [0, 1], [1, 2, 3]][: 2 if seat.ranks == 2 else 3]
    gloo = [(group, dist.new_group(group)) for group in groups]
    shm = [dist.new_group(group, backend=plait.shm.BACKEND) for group in groups]
    wrong = differences(gloo, shm, seat.rank, seed, count)
    dist.barrier()
    dist.destroy_process_group()
    return wrong


def _launched(main: Callable[..., Any], ranks: int, *more: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(lambda seat: main(seat, Path(folder), *more), ranks=ranks)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"


def main() -> int:
    """Print a table; 1 where something is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixed", type=int, default=0, help="random collectives to compare with gloo's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"core: {'compiled' if compiled() else 'Python'}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    failed = False
    for ranks in options.ranks:
        if options.mixed:
            wrong = _launched(_mixed, ranks, options.mixed, options.seed)
            print(f"{ranks} ranks: {options.mixed:,} collectives, {len(wrong[0])} differ from gloo's")
            failed |= any(wrong)
            continue
        for row in (*_launched(_collectives, ranks)[0], *_launched(_ddp, ranks)[0]):
            what, gloo_s, own_s, bar = row
            ratio = gloo_s / own_s
            failed |= ratio < bar
            told = "ok" if ratio >= bar else "MISSED"
            times = f"gloo {gloo_s * 1e3:9.3f} ms  {own_s * 1e3:9.3f} ms  {ratio:5.1f}x"
            print(f"{ranks} ranks  {what:38} {times}  bar {bar}x  {told}")
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
