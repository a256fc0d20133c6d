"""A cluster of which the hosts are one machine, with a network between them that is emulated.

In: what is known of the machine, an `Emulation`. Out: the cluster that a run with it has.
"""

from dataclasses import replace

from plait.cluster.cluster import Cluster, Link
from plait.options import Emulation


def emulated(machine: Cluster, emulation: Emulation) -> Cluster:
    """The machine's devices in as many hosts; what its own sockets take is part of the latency between them."""
    between = Link(
        latency_s=emulation.latency_s + machine.between.latency_s,
        bandwidth=min(emulation.bandwidth, machine.between.bandwidth),
        shared=True,
        direct=True,
    )
    name = f"{machine.name} as {emulation.hosts}x{emulation.per_host}"
    return replace(
        machine,
        name=name,
        hosts=emulation.hosts,
        devices_per_host=emulation.per_host,
        between=between,
        emulated=True,
    )
