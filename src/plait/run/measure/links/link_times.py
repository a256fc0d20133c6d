"""How fast the processes of this machine reach each other: every collective, by every algorithm and backend.

In: numbers of ranks, sizes. Out: seconds, a fitted latency and bandwidth of each, and which backend can do what, tried.
All turns of one size alternate between backends and algorithms, so that other load falls on all of them alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from plait.files.scratch import scratch_folder
from plait.options import Listener
from plait.plan.mesh import Mesh
from plait.program.hops.algorithms import algorithms_of
from plait.program.hops.program import collective_program
from plait.program.hops.rounds import AXIS, block_sizes
from plait.run.link.backend.create import register
from plait.run.link.backend.group import BACKEND
from plait.run.link.hops import run_hops
from plait.run.link.shared_links import share_memory
from plait.run.measure.fit import Fit, fit_line
from plait.run.measure.links.backend_table import Tried, try_backends
from plait.run.setup.interfaces import keep_gloo_here
from plait.run.start.launch import Seat, launch

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 23)
"""Bytes of a tensor: from where latency decides to where bandwidth does."""
_TURNS = 7
"""Of each; the median of six stands when two are disturbed."""
_TIMEOUT_S = 120.0
"""For a rank that waits for others."""

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkTime:
    """One collective, as it was timed."""

    operation: str
    algorithm: str
    """One of `ALGORITHMS` as messages through shared memory; `shared`: plait_shm; `gloo`."""
    ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport:
    """What is known of this machine's links."""

    times: tuple[LinkTime, ...]
    tried: tuple[Tried, ...]
    """Every backend with every operation."""

    def fits(self) -> Mapping[tuple[str, str, int], Fit]:
        """By (operation, algorithm, ranks): seconds that do not depend on the size, and seconds a byte."""
        points: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
        for entry in self.times:
            key = entry.operation, entry.algorithm, entry.ranks
            points.setdefault(key, []).append((float(entry.num_bytes), entry.seconds))
        return {key: fit_line(found) for key, found in points.items()}

    def best(self, operation: str, ranks: int) -> list[tuple[int, str]]:
        """The quickest algorithm for each size: where it changes, lines cross."""
        found: dict[int, LinkTime] = {}
        for entry in self.times:
            if (entry.operation, entry.ranks) == (operation, ranks):
                known = found.get(entry.num_bytes)
                if known is None or entry.seconds < known.seconds:
                    found[entry.num_bytes] = entry
        return [(size, found[size].algorithm) for size in sorted(found)]


def measure_links(
    ranks: Sequence[int], sizes: Sequence[int], operations: Sequence[str], listener: Listener
) -> LinkReport:
    """Time everything; some seconds for each number of ranks."""
    times: list[LinkTime] = []
    for count in ranks:
        listener({"stage": f"links of {count} processes"})
        with scratch_folder() as folder:
            main = partial(_rank, folder=folder, sizes=tuple(sizes), operations=tuple(operations))
            rows = launch(main, ranks=count)[0]
        times += [
            LinkTime(operation=op, algorithm=how, ranks=count, num_bytes=size, seconds=seconds)
            for op, how, size, seconds in rows
        ]
    listener({"stage": "what backends can do"})
    return LinkReport(times=tuple(times), tried=try_backends(max(ranks)))


def _rank(seat: Seat, folder: Path, sizes: Sequence[int], operations: Sequence[str]) -> list[list[Any]]:
    store = dist.FileStore(str(folder / "store"), seat.ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=_TIMEOUT_S)
    keep_gloo_here()
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks, timeout=limit)
    register()
    shm = dist.new_group(backend=BACKEND)
    links = share_memory(Mesh(axes=((AXIS, seat.ranks),)), seat.rank, _TIMEOUT_S)
    found: list[list[Any]] = []
    for operation in operations:
        for size in sizes:
            runs: dict[str, Run] = {
                "gloo": _backend_run(operation, size, seat, dist.group.WORLD),
                "shared": _backend_run(operation, size, seat, shm),
            }
            if links is not None:
                for algorithm in algorithms_of(operation, seat.ranks):
                    runs[algorithm] = _hop_run(operation, algorithm, size, seat, links)
            for name, seconds in _alternate(runs, shm).items():
                found.append([operation, name, size, seconds])
    dist.barrier()
    dist.destroy_process_group()
    return found


def _alternate(runs: Mapping[str, Run], group: Any) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_TURNS):
        for name, run in runs.items():
            dist.barrier(group=group)
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: median(found[1:]) for name, found in times.items()}


def _hop_run(operation: str, algorithm: str, size: int, seat: Seat, links: Any) -> Run:
    program = collective_program(operation, algorithm, seat.ranks, size)
    own = program.of(seat.rank).instructions
    number = seat.ranks**2 if operation == "all_to_all" else seat.ranks
    count = size // 4 * (seat.ranks if operation == "all_to_all" else 1)
    blocks = list(torch.split(torch.zeros(count), list(block_sizes(count, number))))

    def run() -> None:
        for _ in run_hops(own, links, blocks):
            pass

    return run


def _backend_run(operation: str, size: int, seat: Seat, group: Any) -> Run:
    """The same through torch.distributed; of pieces, `size` is all of them together."""
    ranks, count = seat.ranks, max(seat.ranks, size // 4)
    whole, piece = torch.zeros(count), torch.zeros(count // ranks)
    pieces = [torch.zeros(count // ranks) for _ in range(ranks)]
    at_root = pieces if seat.rank == 0 else None
    match operation:
        case "broadcast":
            return partial(dist.broadcast, whole, 0, group=group)
        case "reduce":
            return partial(dist.reduce, whole, 0, group=group)
        case "all_reduce":
            return partial(dist.all_reduce, whole, group=group)
        case "all_gather":
            return partial(dist.all_gather, pieces, piece, group=group)
        case "gather":
            return partial(dist.gather, piece, at_root, 0, group=group)
        case "scatter":
            return partial(dist.scatter, piece, at_root, 0, group=group)
        case "reduce_scatter":
            return partial(dist.reduce_scatter, piece, pieces, group=group)
    given = whole[: count // ranks * ranks]
    return partial(dist.all_to_all_single, torch.empty_like(given), given, group=group)
