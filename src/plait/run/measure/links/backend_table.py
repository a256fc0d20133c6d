"""Which backend of torch.distributed can do which operation: every cell is tried.

In: a number of ranks. Out: for each backend and operation whether it gave the right result, or why it was not tried. A
backend that this torch or this machine lacks is said to be untried, never guessed.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.files.scratch import scratch_folder
from plait.processes import run_program
from plait.run.link.backend.create import register
from plait.run.setup.interfaces import choose_interfaces, keep_gloo_here
from plait.run.start.launch import Seat, launch

BACKENDS = ("gloo", "plait_shm", "mpi", "nccl")
"""The columns; nccl on GPUs, the others on processors; mpi through mpi4py, with which `links.transport=mpi` works."""
OPERATIONS = (
    "send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "barrier",
)  # fmt: skip
"""The rows of the table, as torch's own documentation has them."""
_TIMEOUT_S = 20.0
"""After which a cell has failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One cell."""

    backend: str
    operation: str
    works: bool | None
    """None: it was not tried."""
    why: str = ""
    """Why it does not, or was not."""


def try_backends(ranks: int) -> tuple[Tried, ...]:
    """The whole table."""
    found: list[Tried] = []
    for backend in BACKENDS:
        why = _absent(backend)
        if backend == "mpi" and not why:
            found += _try_mpi()
            continue
        if why:
            found += [Tried(backend=backend, operation=name, works=None, why=why) for name in OPERATIONS]
            continue
        with scratch_folder() as folder:
            rows = launch(partial(_rank, backend=backend, folder=folder), ranks=ranks)
        for at, name in enumerate(OPERATIONS):
            wrong = next((row[at] for row in rows if row[at]), "")
            found.append(Tried(backend=backend, operation=name, works=not wrong, why=wrong))
    return tuple(found)


def _absent(backend: str) -> str:
    if backend == "mpi" and (shutil.which("mpirun") is None or find_spec("mpi4py") is None):
        return "there is no mpirun or no mpi4py (apt-get install openmpi-bin, pip install plait[mpi])"
    if (
        backend == "nccl" and not launch(_has_gpu, ranks=1)[0]
    ):  # a process that asks cannot be forked any more
        return "there is no GPU"
    return ""


def _has_gpu(seat: Seat) -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _try_mpi() -> list[Tried]:
    """Through mpi4py, as `links.transport=mpi` has it, between two processes that mpirun starts."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PMI_"))
    }
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [
        "mpirun",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "plait.run.measure.links.mpi_table",
    ]
    try:
        done = run_program(command, kept, patience_s=3 * _TIMEOUT_S)
        rows = json.loads(done.out.splitlines()[-1]) if done.status == 0 else None
        why = "" if rows is not None else (done.err.strip().splitlines() or ["mpirun failed"])[-1][:120]
    except (OSError, ValueError, IndexError) as error:
        rows, why = None, str(error).splitlines()[0][:120]
    if rows is None:
        return [Tried(backend="mpi", operation=name, works=False, why=why) for name in OPERATIONS]
    return [Tried(backend="mpi", operation=name, works=not wrong, why=wrong) for name, wrong in rows]


def _rank(seat: Seat, backend: str, folder: Path) -> list[str]:
    store = dist.FileStore(str(folder / "store"), seat.ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=_TIMEOUT_S)
    register()
    keep_gloo_here()
    if backend == "nccl":
        choose_interfaces(seat.rank if torch.cuda.device_count() < seat.ranks else None)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.ranks, timeout=limit)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", seat.rank % torch.cuda.device_count())
    found = []
    for name in OPERATIONS:
        try:
            found.append("" if _CELLS[name](seat.rank, seat.ranks, device) else "gives a wrong result")
        except Exception as error:
            found.append(str(error).splitlines()[0][:120] or type(error).__name__)
    dist.destroy_process_group()
    return found


def _message(rank: int, ranks: int, device: torch.device) -> bool:
    tensor = torch.full((5,), float(rank), device=device)
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    return rank != 1 or bool((tensor == 0).all())


def _summed(rank: int, ranks: int, device: torch.device, *, everywhere: bool) -> bool:
    tensor = torch.full((5,), float(rank), device=device)
    if everywhere:
        dist.all_reduce(tensor)
    else:
        dist.reduce(tensor, 0)
    return (not everywhere and rank > 0) or bool((tensor == sum(range(ranks))).all())


def _broadcast(rank: int, ranks: int, device: torch.device) -> bool:
    tensor = torch.full((5,), float(rank), device=device)
    dist.broadcast(tensor, 1)
    return bool((tensor == 1).all())


def _gathered(rank: int, ranks: int, device: torch.device, *, everywhere: bool) -> bool:
    own = torch.full((5,), float(rank), device=device)
    outs = [torch.empty_like(own) for _ in range(ranks)]
    if everywhere:
        dist.all_gather(outs, own)
    else:
        dist.gather(own, outs if rank == 0 else None, 0)
    return (not everywhere and rank > 0) or all(bool((out == at).all()) for at, out in enumerate(outs))


def _scatter(rank: int, ranks: int, device: torch.device) -> bool:
    out = torch.empty(5, device=device)
    dist.scatter(out, [torch.full_like(out, float(at)) for at in range(ranks)] if rank == 0 else None, 0)
    return bool((out == rank).all())


def _reduce_scatter(rank: int, ranks: int, device: torch.device) -> bool:
    out = torch.empty(5, device=device)
    dist.reduce_scatter(out, [torch.full_like(out, float(at)) for at in range(ranks)])
    return bool((out == rank * ranks).all())


def _all_to_all(rank: int, ranks: int, device: torch.device) -> bool:
    out = torch.empty(ranks, device=device)
    dist.all_to_all_single(out, torch.arange(ranks, device=device) + 10.0 * rank)
    return out.tolist() == [10.0 * source + rank for source in range(ranks)]


def _barrier(rank: int, ranks: int, device: torch.device) -> bool:
    dist.barrier()
    return True


_CELLS: dict[str, Any] = {
    "send": _message,
    "recv": _message,
    "broadcast": _broadcast,
    "all_reduce": partial(_summed, everywhere=True),
    "reduce": partial(_summed, everywhere=False),
    "all_gather": partial(_gathered, everywhere=True),
    "gather": partial(_gathered, everywhere=False),
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
