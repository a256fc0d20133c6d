"""Which operations MPI can do through mpi4py, each tried between two tasks of mpirun.

In: nothing. Out: on the first task, a JSON list with the name of each operation and what is wrong with it, "" where it
gave the right result. Run as a program of its own: mpirun starts its processes itself.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np


def _cells(world: Any, mpi: Any) -> dict[str, Callable[[], bool]]:
    rank, size = world.rank, world.size
    own, room = np.full(5, float(rank)), np.zeros(5)
    everybody = np.arange(float(size))
    total = everybody.sum()

    def message() -> bool:
        got = own.copy()
        if rank == 0:
            world.Send(own, 1)
        elif rank == 1:
            world.Recv(got, 0)
        return rank != 1 or bool((got == 0).all())

    def broadcast() -> bool:
        got = own.copy()
        world.Bcast(got, 1)
        return bool((got == 1).all())

    def gathered(*, everywhere: bool) -> bool:
        got = np.zeros((size, 5))
        if everywhere:
            world.Allgather(own, got)
        else:
            world.Gather(own, got, 0)
        return (not everywhere and rank > 0) or bool((got == everybody[:, None]).all())

    def reduced(*, everywhere: bool) -> bool:
        if everywhere:
            world.Allreduce(own, room, mpi.SUM)
        else:
            world.Reduce(own, room, mpi.SUM, 0)
        return (not everywhere and rank > 0) or bool((room == total).all())

    def scatter() -> bool:
        world.Scatter(np.repeat(everybody, 5).reshape(size, 5), room, 0)
        return bool((room == rank).all())

    def reduce_scatter() -> bool:
        world.Reduce_scatter_block(np.repeat(everybody, 5), room, mpi.SUM)
        return bool((room == rank * size).all())

    def all_to_all() -> bool:
        got = np.zeros(size)
        world.Alltoall(everybody + 10.0 * rank, got)
        return bool((got == 10.0 * everybody + rank).all())

    def barrier() -> bool:
        world.Barrier()
        return True

    return {
        "send": message, "recv": message, "broadcast": broadcast, "all_reduce": lambda: reduced(everywhere=True),
        "reduce": lambda: reduced(everywhere=False), "all_gather": lambda: gathered(everywhere=True),
        "gather": lambda: gathered(everywhere=False), "scatter": scatter, "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all, "barrier": barrier,
    }  # fmt: skip


def main() -> None:
    """One task of mpirun."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    wrong: list[tuple[str, str]] = []
    for name, cell in _cells(world, MPI).items():
        try:
            wrong.append((name, "" if cell() else "gives a wrong result"))
        except Exception as error:
            wrong.append((name, str(error).splitlines()[0][:120] or type(error).__name__))
    told = world.gather(wrong, 0)
    if told is not None:
        names = [name for name, _ in wrong]
        worst = [next((row[at][1] for row in told if row[at][1]), "") for at in range(len(names))]
        print(json.dumps(list(zip(names, worst, strict=True))))


if __name__ == "__main__":
    main()
