"""Which links ranks have to each other: shared memory on one host, two levels on several, sockets or NCCL elsewhere.

In: a mesh, a rank, what the plan allows. Out: `Links`. All ranks decide the same: each tells where it is, and the first
one what is known of its machine.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import groupby

import torch

from plait.cluster.cluster import Device, Link, Reach
from plait.cluster.devices import DEVICES
from plait.cluster.emulated import emulated
from plait.cluster.parse import THIS, measured_path, parse_cluster
from plait.errors import ClusterError
from plait.options import Emulation
from plait.plan.mesh import Mesh
from plait.run.link.host_links import HostLinks, HostMesh
from plait.run.link.links import Links, NoLinks, ProcessLinks
from plait.run.link.shared_links import share_memory
from plait.run.link.shared_memory import host
from plait.run.wire.tell import tell


def links_between(
    mesh: Mesh,
    rank: int,
    device: torch.device,
    *,
    timeout_s: float,
    share: bool = True,
    emulation: Emulation | None = None,
) -> Links:
    """The fastest links of this rank to the others: memory within a host's processors, else torch.distributed."""
    if mesh.size == 1:
        return NoLinks()
    if not share or device.type != "cpu":
        return ProcessLinks(mesh, rank)
    sizes = [len(list(ranks)) for _, ranks in groupby(tell(host()))]
    hosts = HostMesh.of(mesh, sizes[0]) if len(set(sizes)) == 1 and 1 < sizes[0] < mesh.size else None
    if hosts is None:
        shared = share_memory(mesh, rank, timeout_s) if len(sizes) == 1 else None
        return shared if shared is not None else ProcessLinks(mesh, rank)
    within, per_host = hosts.within, sizes[0]

    def share_here() -> Links | None:
        return share_memory(within, rank % per_host, timeout_s, first=rank - rank % per_host)

    shared_here = share_here()
    if shared_here is None:
        return ProcessLinks(mesh, rank)
    return HostLinks(hosts, rank, shared_here, share_here, _reach_of(per_host, emulation), _DEVICE)


_DEVICE: Device = DEVICES["cpu"].device
"""By whose constants collectives are priced: they matter little beside the links."""


def _reach_of(per_host: int, emulation: Emulation | None) -> Callable[[int, int], Reach]:
    """What a group crosses, by the first rank's knowledge of its machine."""
    preset = DEVICES["cpu"]
    machine = preset.cluster("cpu", 1, per_host)
    if measured_path().exists():
        with suppress(ClusterError):  # of another version: what a processor usually has will do
            machine = parse_cluster(THIS)
    if emulation is not None:
        machine = emulated(machine, emulation)
    numbers = [[link.latency_s, link.bandwidth] for link in (machine.host, machine.between)]
    (inner_s, inner_rate), (outer_s, outer_rate) = tell(numbers)[0]
    inner = Link(latency_s=inner_s, bandwidth=inner_rate, shared=True, background=False)
    outer = Link(latency_s=outer_s, bandwidth=outer_rate, shared=True, direct=True)

    def reach(size: int, each: int) -> Reach:
        return Reach(
            size=size, per_host=each, hosts=size // each, inner=inner, outer=outer, at_once=max(1, per_host // each)
        )  # fmt: skip

    return reach
