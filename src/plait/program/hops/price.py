"""Which algorithm a collective is made by, by cost: of every algorithm its seconds on a network, round after round.

In: a collective, the ranks that meet, what is known of the links within a host and between hosts. Out: seconds by
algorithm, `backend` among them, and the cheapest. A pure function of numbers that all ranks share, so that all choose
alike; the simulator prices a run with the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from plait.cluster.cluster import Cluster, Link, Reach
from plait.cluster.devices import DEVICES
from plait.plan.plan import Plan
from plait.program.cost.collective_time import Travel, collective_seconds
from plait.program.hops.algorithms import ALGORITHMS, rounds_of
from plait.program.hops.rounds import Rounds, block_sizes
from plait.program.instructions import Collective
from plait.program.program import Program
from plait.units import format_bytes, format_seconds

BACKEND = "backend"
"""As the transport does it."""
_ROUND_S = 1e-4
"""That a round of messages takes beside the links: each is named, sent, waited for and added by the rank itself."""
_KEPT = 4096
"""Prices that are remembered: the collectives of a step come again in the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Where ranks are, and the links between them."""

    hosts: tuple[int, ...]
    """Of every rank."""
    inner: Link
    """Within a host."""
    outer: Link
    """Between hosts."""

    @classmethod
    def of(cls, cluster: Cluster, ranks: int) -> "Network":
        """That of a cluster whose devices the ranks fill one after the other; without the work of processors, so that
        ranks, which do not know it, and predictions choose alike."""
        hosts = tuple(rank // cluster.devices_per_host for rank in range(ranks))
        outer = replace(cluster.between, work_s=0.0, work_s_per_byte=0.0)
        return cls(hosts=hosts, inner=cluster.host, outer=outer)

    @property
    def per_host(self) -> int:
        """Ranks of the fullest host."""
        return max(self.hosts.count(host) for host in set(self.hosts))

    def hosts_of(self, group: Sequence[int]) -> int:
        """Of how many hosts each has as many consecutive ranks of a group; 1 where that is not so."""
        on = [self.hosts[rank] for rank in group]
        count = len(set(on))
        each = len(on) // count
        boxed = len(on) == count * each and all(on[at] == on[at // each * each] for at in range(len(on)))
        return count if boxed else 1

    def reach(self, group: Sequence[int]) -> Reach:
        """What a group crosses."""
        on = [self.hosts[rank] for rank in group]
        each = max(on.count(host) for host in set(on))
        return Reach(
            size=len(group), per_host=each, hosts=len(set(on)), inner=self.inner, outer=self.outer,
            at_once=max(1, self.per_host // each),
        )  # fmt: skip


@lru_cache(_KEPT)
def prices(op: str, num_bytes: int, group: tuple[int, ...], network: Network) -> dict[str, float]:
    """Seconds by algorithm, the cheapest first."""
    found = {BACKEND: collective_seconds(op, num_bytes, network.reach(group), DEVICES["cpu"].device)}
    for algorithm in ALGORITHMS:
        rounds = rounds_of(op, algorithm, len(group), hosts=network.hosts_of(group))
        found[algorithm] = sum(round_times(rounds, num_bytes, group, network))
    return dict(sorted(found.items(), key=lambda entry: entry[1]))


def round_times(rounds: Rounds, num_bytes: int, group: Sequence[int], network: Network) -> list[float]:
    """Seconds of each round; what leaves a host at once shares its wire, what stays in it its memory."""
    sizes = block_sizes(num_bytes, len(group))
    found = []
    for hops in rounds:
        within: dict[int, float] = {}
        between: dict[int, float] = {}
        for hop in hops:
            host, to = network.hosts[group[hop.source]], network.hosts[group[hop.to]]
            loads = within if host == to else between
            key = host if (network.inner if host == to else network.outer).shared else -1 - hop.source
            loads[key] = loads.get(key, 0.0) + sum(sizes[block] for block in hop.blocks)
        seconds = [
            link.latency_s + max(loads.values()) / link.bandwidth
            for link, loads in ((network.inner, within), (network.outer, between))
            if loads
        ]
        found.append(_ROUND_S + max(seconds, default=0.0))
    return found


def algorithm_of(asked: str, collective: Collective, group: tuple[int, ...], network: Network) -> str:
    """What a collective is made by where a plan asks for `asked`: that, or of `auto` the cheapest."""
    if len(group) < 2 or collective.op.startswith("halo") or asked == "shared":
        return BACKEND
    if asked != "auto":
        return asked
    return next(iter(prices(collective.op, collective.num_bytes, group, network)))


def hop_travel(plan: Plan, collective: Collective, group: tuple[int, ...], network: Network) -> Travel | None:
    """How long a collective takes that the plan has made hop by hop; None: it is not."""
    if not plan.links.by_hops:
        return None
    algorithm = algorithm_of(plan.links.algorithm, collective, group, network)
    if algorithm == BACKEND:
        return None
    seconds = prices(collective.op, collective.num_bytes, group, network)[algorithm]
    latency_s = prices(collective.op, 0, group, network)[algorithm]
    return Travel(wire_s=seconds - latency_s, latency_s=latency_s)


def choices_of(program: Program, network: Network) -> list[str]:
    """For people: how collectives are made under `auto`, and what else costs; or that there are none to choose for."""
    plan = program.plan
    if not plan.links.by_hops or plan.mesh.size == 1:
        return []
    found: dict[str, None] = {}
    for rank in map(program.members.index, range(len(program.classes))):
        for instruction in program.of(rank).instructions:
            if not isinstance(instruction, Collective) or instruction.op.startswith("halo"):
                continue
            group = plan.mesh.group(rank, instruction.axis)
            if len(group) < 2:
                continue
            told = [
                f"{name} {format_seconds(seconds)}"
                for name, seconds in prices(instruction.op, instruction.num_bytes, group, network).items()
            ]
            size = format_bytes(instruction.num_bytes)
            found[f"{instruction.op} of {size} among {len(group)}: {told[0]}; {', '.join(told[1:4])}."] = None
    if not found:
        return [
            f"links.algorithm={plan.links.algorithm} has nothing to choose: under {plan.name} no ranks sum or gather; "
            "what they exchange goes from one to one other."
        ]
    return [f"links.algorithm=auto: {line}" for line in found if plan.links.algorithm == "auto"]
