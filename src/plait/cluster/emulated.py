"""A cluster of which the hosts are one machine, with a network between them that is emulated.

In: what is known of the machine, an `Emulation`. Out: the cluster that a run with it has.
"""

from dataclasses import replace

from plait.cluster.cluster import Cluster, Device, Link
from plait.options import Emulation

_WORK_S = 4e-4
"""Processor time of a rank for a collective over sockets, where `plait measure` has not found it out: on an AMD EPYC of
2.6 GHz, of eight that were under way at once."""
_WORK_S_PER_BYTE = 6e-10
"""The same for every byte: copies, sums, and the system's sockets."""


def emulated(machine: Cluster, emulation: Emulation) -> Cluster:
    """The machine's devices in as many hosts; what its own sockets take beside the work of its processors is part of
    the latency between them."""
    own = by_sockets(machine.between)
    between = replace(
        own,
        latency_s=emulation.latency_s + max(0.0, own.latency_s - own.work_s),
        bandwidth=min(emulation.bandwidth, own.bandwidth),
    )
    name = f"{machine.name} as {emulation.hosts}x{emulation.per_host}"
    cluster = replace(
        machine, name=name, hosts=emulation.hosts, devices_per_host=emulation.per_host, between=between
    )
    return on_one_machine(cluster, machine.size)


def on_one_machine(cluster: Cluster, processors: int) -> Cluster:
    """Hosts that are processes of one machine: where there are more ranks than processors, these are shared."""
    crowd = max(1.0, cluster.size / processors)
    return replace(
        cluster,
        device=_crowded(cluster.device, crowd),
        between=by_sockets(cluster.between, crowd=crowd),
        emulated=True,
        processors=processors if processors < cluster.size else None,
    )


def _crowded(device: Device, crowd: float) -> Device:
    """A device that has one part in `crowd` of a processor; what was timed says how many were busy."""
    constants = device.calibration
    return replace(
        device,
        peak_flops={dtype: rate / crowd for dtype, rate in device.peak_flops.items()},
        memory_bandwidth=device.memory_bandwidth / crowd,
        calibration=replace(constants, kernel_s=constants.kernel_s * crowd, step_s=constants.step_s * crowd),
    )


def by_sockets(link: Link, *, crowd: float = 1.0) -> Link:
    """The link between hosts as our sockets use it: they send on the processors that compute."""
    return replace(
        link,
        shared=True,
        direct=True,
        work_s=(link.work_s or _WORK_S) * crowd,
        work_s_per_byte=(link.work_s_per_byte or _WORK_S_PER_BYTE) * crowd,
    )
