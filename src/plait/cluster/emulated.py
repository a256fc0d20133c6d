"""A cluster of which the hosts are one machine, with a network between them that is emulated.

In: what is known of the machine, an `Emulation`. Out: the cluster that a run with it has.
"""

from dataclasses import replace

from plait.cluster.cluster import Cluster, Link
from plait.options import Emulation

_WORK_S = 6e-4
"""Processor time of a rank for a collective over our sockets: measured with tensors of 1 KB, all threads together."""
_WORK_S_PER_BYTE = 1.5e-9
"""The same for every byte: 12 to 14 ms for 8 MiB; copying, adding up, and the system's sockets."""


def emulated(machine: Cluster, emulation: Emulation) -> Cluster:
    """The machine's devices in as many hosts; what its own sockets take is part of the latency between them.

    Ranks send on the processors that compute; where there are more ranks than processors, these are shared.
    """
    crowd = max(1.0, emulation.ranks / machine.size)
    between = Link(
        latency_s=emulation.latency_s + machine.between.latency_s,
        bandwidth=min(emulation.bandwidth, machine.between.bandwidth),
        shared=True,
        direct=True,
        work_s=_WORK_S * crowd,
        work_s_per_byte=_WORK_S_PER_BYTE * crowd,
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
