"""How fast the hosts of a run reach each other: the cluster that an engine's tasks are.

In: the tasks, what is known of one host. Out: a cluster of as many hosts, with the link between them fitted to
all-reduces of their first ranks, while all others wait. Hosts are taken to be equal to the first one. What is found out
at task 0 is known on all.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from plait.cluster.cluster import Cluster
from plait.cluster.emulated import by_sockets, on_one_machine
from plait.run.join.place import Place
from plait.run.link.shm.memory import host, machine
from plait.run.measure.fit import fit_line, socket_link
from plait.run.setup.allocator import keep_freed_memory
from plait.run.start.guardian import Guardian
from plait.run.start.launch import OtherTasks, Seat, connect, disconnect, launch
from plait.run.start.party import join, telling
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower
from plait.run.wire.tell import tell
from plait.version import VERSION

_SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Bytes of the all-reduces to which the link between hosts is fitted: in two exchanges each, up to some buckets."""
_REPEATS = 5
"""Of each; the median of four stands when one is disturbed."""
_BEGIN_S = 600.0
"""For other tasks to come to where this one is: they have met before, and do the same."""
_TIMEOUT_S = 120.0
"""After which a measurement counts as hanging: it takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """What an engine started, as a cluster."""

    cluster: Cluster
    residuals: Mapping[int, float]
    """By size: how far the fit is off."""


def led(place: Place, what: str, lead: Callable[[First], dict[str, Any]]) -> dict[str, Any]:
    """What task 0 finds out by `lead`, which may measure hosts, on all tasks."""
    party = join(place, place.tasks)
    facts = {"version of plait": VERSION, "version of torch": torch.__version__, "command": what}
    if isinstance(party, Follower):
        party.begin(facts)
        with Guardian() as guardian:
            found: dict[str, Any] = party.follow(lambda of: (_time_links, 1, "auto"), guardian=guardian)
        return found
    with telling(party):
        party.begin(facts, patience_s=_BEGIN_S)
        found = lead(party)
        party.end(found)
    return found


def measure_hosts(party: First, known: Cluster) -> Hosts:
    """The cluster of all tasks, of which `known` is one host."""
    found = launch(_time_links, ranks=party.place.tasks, hang_s=_TIMEOUT_S, tasks=OtherTasks(party=party))
    places = [entry["host"] for entry in found]
    count = len(set(places))
    if count == 1:
        return Hosts(cluster=known, residuals={})
    points = [(float(size), seconds) for size, seconds in found[0]["times"]]
    line = fit_line(points)
    link = socket_link(line, count, known.device.calibration)
    own = known.between  # of which all is work of processors: there is no network in it
    between = by_sockets(replace(link, work_s=own.work_s, work_s_per_byte=own.work_s_per_byte))
    name = f"{count} hosts of {known.devices_per_host}"
    cluster = replace(known, name=name, hosts=count, between=between)
    if len({entry["machine"] for entry in found}) == 1:
        cluster = on_one_machine(cluster, known.size)
    residuals = {int(size): round(error, 3) for size, error in line.residuals.items()}
    return Hosts(cluster=cluster, residuals=residuals)


def told(cluster: Cluster) -> dict[str, Any]:
    """A cluster for other tasks."""
    found: dict[str, Any] = msgspec.to_builtins(cluster)
    return found


def heard(said: Mapping[str, Any]) -> Cluster:
    """The cluster again."""
    return msgspec.convert(said, Cluster)


def _time_links(seat: Seat) -> dict[str, Any]:
    keep_freed_memory()
    connect(seat, timeout_s=2 * _TIMEOUT_S)
    try:
        places = [str(place) for place in tell(host())]
        firsts = sorted(places.index(place) for place in set(places))
        times = []
        group = dist.new_group(firsts)
        if seat.rank in firsts and len(firsts) > 1:
            times = [[size, _all_reduce_s(size, group)] for size in _SIZES]
        dist.barrier()
        return {"host": places[seat.rank], "machine": machine(), "times": times}
    finally:
        disconnect()


def _all_reduce_s(size: int, group: Any) -> float:
    tensor, times = torch.zeros(size // 4, dtype=torch.int32), []  # which travel as they are
    for _ in range(_REPEATS):
        dist.barrier(group=group)
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - began)
    return median(times[1:])
