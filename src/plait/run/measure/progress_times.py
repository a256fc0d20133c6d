"""Whether sums in shared memory go faster on a thread beside the computation, or by the rank itself where it waits.

In: ranks of this machine that are all here. Out: seconds of the same computation and the same sums, either way, in
turns.
"""

import time
from collections.abc import Mapping
from statistics import median

import torch

from plait.plan.mesh import Mesh
from plait.program.instructions import Collective
from plait.program.value import Value
from plait.run.link.between import links_between, network_here
from plait.run.link.lanes import Lanes
from plait.run.link.links import Links

_AXIS = "data"
_COUNT = 1 << 18
"""Floats of a sum: 1 MiB, as a bucket has."""
_SUMS = 4
"""Under way in a turn, with a matrix product after each start."""
_TURNS = 7
"""The median of seven stands when three are disturbed."""


def time_progress(rank: int, ranks: int) -> Mapping[str, float]:
    """`inline` and `thread`, as this rank saw them; all ranks must be here."""
    mesh, device = Mesh(axes=((_AXIS, ranks),)), torch.device("cpu")
    network = network_here()
    inline, apart = (
        links_between(mesh, rank, device, timeout_s=60.0, network=network, fresh=True) for _ in range(2)
    )
    ways: dict[str, Links] = {"inline": inline, "thread": Lanes(inline, mesh, {_AXIS: [apart]}, network)}
    rooms = {
        name: [links.buffer(_COUNT, torch.float32, device, _AXIS) for _ in range(_SUMS)]
        for name, links in (("inline", inline), ("thread", apart))
    }
    here = (Value.bucket(0),)
    collective = Collective(
        name="sum", op="all_reduce", axis=_AXIS, reads=here, writes=here, num_bytes=4 * _COUNT
    )
    factor = torch.randn(320, 320)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TURNS + 1):
        for name, links in ways.items():
            links.start(collective, torch.zeros(1)).result()  # all begin together
            began = time.perf_counter()
            handles = []
            for room in rooms[name]:
                handles.append(links.start(collective, room))
                torch.mm(factor, factor)
            for handle in handles:
                handle.result()
            times[name].append(time.perf_counter() - began)
    return {name: median(found[1:]) for name, found in times.items()}
