"""Which links ranks have to each other: shared memory on one host, two levels on several, sockets or NCCL elsewhere.

In: a mesh, a rank, what the plan allows. Out: `Links`. All ranks decide the same: each tells where it is, and the first
one what is known of its machine.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import torch

from plait.cluster.cluster import Link
from plait.cluster.devices import DEVICES
from plait.cluster.emulated import emulated
from plait.cluster.parse import THIS, measured_path, parse_cluster
from plait.errors import ClusterError
from plait.options import Emulation
from plait.plan.mesh import Mesh
from plait.plan.plan import Plan
from plait.program.hops.price import Network
from plait.run.link.hop_links import HopLinks
from plait.run.link.host_links import HostLinks, HostMesh
from plait.run.link.lanes import Lanes
from plait.run.link.links import Links, NoLinks, axes_that_meet
from plait.run.link.mpi_links import MpiLinks
from plait.run.link.process_links import ProcessLinks
from plait.run.link.shared_links import SharedLinks, share_memory
from plait.run.link.shm.memory import host
from plait.run.wire.tell import tell


def network_here(emulation: Emulation | None = None) -> Network:
    """Where all ranks are, and by the first one's knowledge of its machine the links between them; all must ask.

    Of hosts of their own nothing was measured: they have what processors usually have, in every run alike, since what
    is chosen by it is the order in which sums are made.
    """
    usual = DEVICES["cpu"].cluster("cpu", 1, 1)
    machine = usual
    if measured_path().exists():
        with suppress(ClusterError):  # of another version: what a processor usually has will do
            machine = parse_cluster(THIS)
    on_thread = machine is not usual and machine.host.background
    if emulation is not None:
        machine = emulated(machine, emulation)
    numbers = [[link.latency_s, link.bandwidth] for link in (machine.host, machine.between)]
    told = tell([host(), numbers, on_thread])
    places = [place for place, _, _ in told]
    if emulation is None and len(set(places)) > 1:
        inner, outer = usual.host, usual.between
    else:
        inner, outer = (Link(latency_s=latency_s, bandwidth=rate) for latency_s, rate in told[0][1])
    return Network(
        hosts=tuple(places.index(place) for place in places),
        inner=replace(inner, shared=True, background=told[0][2]),
        outer=replace(outer, shared=True, direct=True),
    )


def links_of_plan(
    plan: Plan,
    rank: int,
    device: torch.device,
    *,
    timeout_s: float,
    emulation: Emulation | None = None,
    lost: Callable[[int], Exception | None] = lambda rank: None,
) -> Links:
    """As the plan wants them: by which transport and algorithm, and spread over how many groups.

    `lost`: why nothing more comes from a rank, as the run's own sockets know it.
    """
    mesh, wanted = plan.mesh, plan.links
    if wanted.transport == "mpi" and mesh.size > 1:
        return MpiLinks(mesh, rank, timeout_s, lost)
    share = wanted.transport != "sockets"
    network = network_here(emulation) if mesh.size > 1 and device.type == "cpu" else None

    def made(*, fresh: bool) -> Links:
        return links_between(
            mesh, rank, device, timeout_s=timeout_s, share=share, network=network, fresh=fresh
        )

    links = made(fresh=False)
    return links if network is None else with_lanes(links, plan, rank, network, lambda: made(fresh=True))


def with_lanes(links: Links, plan: Plan, rank: int, network: Network, fresh: Callable[[], Links]) -> Links:
    """The same links, with collectives by the plan's algorithm and on as many groups; every rank of a run must ask.

    `fresh` makes more such links, which nobody else uses, so that a thread may.
    """
    mesh, wanted = plan.mesh, plan.links
    on_thread = network.inner.background and isinstance(
        links, SharedLinks
    )  # where `plait measure` found it to pay
    if wanted.groups == 1 and not wanted.by_hops and not on_thread:
        return links
    lanes: dict[str, list[Links]] = {}
    for axis in axes_that_meet(mesh):
        own = lanes[axis] = [fresh() for _ in range(wanted.groups)]
        if wanted.by_hops:
            lanes[axis] = [
                HopLinks(entry, mesh, rank, wanted.algorithm, network, f"{axis} {at} ")
                for at, entry in enumerate(own)
            ]
    return Lanes(links, mesh, lanes, network)


def links_between(
    mesh: Mesh,
    rank: int,
    device: torch.device,
    *,
    timeout_s: float,
    share: bool = True,
    network: Network | None = None,
    fresh: bool = False,
) -> Links:
    """The fastest links of this rank to the others: memory within a host's processors, else torch.distributed.

    `fresh`: with groups of torch.distributed that nobody else uses, so that a thread may.
    """
    if mesh.size == 1:
        return NoLinks()
    if not share or device.type != "cpu":
        return ProcessLinks(mesh, rank, fresh=fresh)
    network = network if network is not None else network_here()
    sizes = [len(list(ranks)) for _, ranks in groupby(network.hosts)]
    hosts = HostMesh.of(mesh, sizes[0]) if len(set(sizes)) == 1 and 1 < sizes[0] < mesh.size else None
    if hosts is None:
        shared = share_memory(mesh, rank, timeout_s) if len(sizes) == 1 else None
        return shared if shared is not None else ProcessLinks(mesh, rank, fresh=fresh)
    within, per_host = hosts.within, sizes[0]

    place = rank % per_host

    def share_by_threads() -> tuple[Links, Links] | None:
        first = share_memory(within, place, timeout_s, first=rank - place, threads=2)
        return None if first is None else (first, first.for_next_thread())

    shared_here = share_memory(within, place, timeout_s, first=rank - place)
    if shared_here is None:
        return ProcessLinks(mesh, rank, fresh=fresh)
    return HostLinks(hosts, rank, shared_here, share_by_threads, network, fresh=fresh)
