"""A cluster: equal devices in equal hosts, and the links between them.

In: numbers from a preset, a file or a measurement. Out: frozen values that the cost functions read. It computes no
times and looks at no machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.cluster.calibration import Calibration
from plait.errors import ClusterError

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
"""Names under which a device may state a rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, or one core's worth of a CPU."""

    name: str
    """As the preset or the file calls it: `A100-80`."""
    memory_bytes: int
    """What a process may use."""
    peak_flops: Mapping[str, float]
    """FLOP/s of matrix products by one of `DTYPES`."""
    memory_bandwidth: float
    """Bytes per second between the device and its memory."""
    calibration: Calibration = field(default_factory=Calibration)
    """How far kernels stay from the peaks."""
    host_bandwidth: float = 0.0
    """Bytes per second between the device and the host's memory, each way, beside its computation; 0: host and device
    are one memory, and who copies does nothing else."""
    processor_bandwidth: float = 118e9
    """Bytes per second that the host's processors, a device's share of them, pass through their memory in an update:
    16 cores beside an H200 made 4.2 G parameters a second with torch's fused AdamW, of 28 bytes each."""
    duplex: float = 0.75
    """Share of `host_bandwidth` that each way has while both are used; fitted to one step on an H200 (docs/log.md)."""
    timed: Mapping[str, float] = field(default_factory=dict)
    """Seconds of single ops that were timed on the device itself, by `program.timing.op_key`."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.peak_flops) - set(DTYPES))
        if unknown:
            raise ClusterError(
                f"device {self.name} states a rate for {', '.join(unknown)}.", fix=f"use {', '.join(DTYPES)}."
            )
        if not self.peak_flops:
            raise ClusterError(
                f"device {self.name} states no rate.", fix="give peak_flops, for example float32."
            )
        numbers: dict[str, float] = {f"peak_flops of {name}": rate for name, rate in self.peak_flops.items()}
        numbers |= {"memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth}
        _check_positive(f"device {self.name}", numbers)
        _check_positive(
            f"device {self.name}", {"processor_bandwidth": self.processor_bandwidth, "duplex": self.duplex}
        )
        if not self.host_bandwidth >= 0:
            raise ClusterError(
                f"device {self.name} has host_bandwidth={self.host_bandwidth}.", fix="give 0 or more."
            )

    def rate(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in a dtype; in one that the device does not state, of the next wider one."""
        wider = {
            "float8": "float16",
            "float16": "bfloat16",
            "bfloat16": "float32",
            "tf32": "float32",
            "float64": "float32",
        }
        tried = dtype
        while tried not in self.peak_flops and tried in wider:
            tried = wider[tried]
        if tried in self.peak_flops:
            return self.peak_flops[tried]
        return min(self.peak_flops.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What devices send each other data through."""

    latency_s: float
    """Time of an empty message between two devices."""
    bandwidth: float
    """Bytes per second, per device and direction."""
    in_network: bool = False
    """The switch adds up what passes through it (NVLS, SHARP)."""
    shared: bool = False
    """One wire for all devices of a host: those that send at once share `bandwidth`."""
    background: bool = True
    """Data moves while devices compute; False: a device does its part of it when it waits for the result."""
    direct: bool = False
    """In a collective, everybody sends to everybody at once, as over our own sockets; else in rings and trees."""
    work_s: float = 0.0
    """For which a collective keeps a device from computing, whatever its size: processors send by themselves."""
    work_s_per_byte: float = 0.0
    """The same for every byte of the tensor."""

    def __post_init__(self) -> None:
        _check_positive("a link", {"bandwidth": self.bandwidth})
        if not self.latency_s >= 0:
            raise ClusterError(f"a link has latency_s={self.latency_s}.", fix="give seconds, 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """What a group of ranks crosses when it communicates."""

    size: int
    """Ranks of the group."""
    per_host: int
    """Of these, how many share a host (the most of any host)."""
    hosts: int
    """Hosts that the group touches."""
    inner: Link
    """Between members on one host."""
    outer: Link
    """Between hosts."""
    at_once: int = 1
    """Groups like this one that use a host's links at the same time, itself included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts of equal devices."""

    name: str
    """As it was written: `64x8xH100`."""
    device: Device
    """Each of them."""
    hosts: int
    """Number of hosts."""
    devices_per_host: int
    """Number of devices in each."""
    pair: Link
    """Between the two devices of a neighbouring pair (two dies of a board, two GPUs with a bridge)."""
    host: Link
    """Between any two devices of a host."""
    between: Link
    """Between devices of different hosts."""
    price_per_hour: float | None = None
    """Of one device, in any currency; None: unknown."""
    emulated: bool = False
    """All hosts are processes of one machine (also in namespaces of their own), whose processors they share."""
    processors: int | None = None
    """Where devices are more than the processors which they all share: how many those are. What is known of a device
    is then what it does while all are at work."""

    def __post_init__(self) -> None:
        for name, number in (("hosts", self.hosts), ("devices_per_host", self.devices_per_host)):
            if not isinstance(number, int) or number < 1:
                raise ClusterError(
                    f"cluster {self.name} has {name}={number}.", fix=f"give {name} as 1 or more."
                )
        if self.price_per_hour is not None and not self.price_per_hour >= 0:
            raise ClusterError(
                f"cluster {self.name} has price_per_hour={self.price_per_hour}.", fix="give 0 or more."
            )

    @property
    def title(self) -> str:
        """Its name, to go on a sentence with."""
        return "this machine" if self.name == "this" else self.name

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.devices_per_host

    @property
    def devices_per_machine(self) -> int:
        """Devices that share what a host really has."""
        return self.size if self.emulated else self.devices_per_host

    def link_of(self, stride: int, count: int) -> Reach:
        """What `count` ranks cross that are `stride` apart, where groups of that shape tile the cluster."""
        per_host = max(1, min(count, self.devices_per_host // stride))
        return self._reach(size=count, per_host=per_host, is_pair=stride * count <= 2)

    def link_among(self, ranks: Sequence[int]) -> Reach:
        """What these ranks cross; rank r is device r % devices_per_host of host r // devices_per_host."""
        on = [rank // self.devices_per_host for rank in ranks]
        per_host = max(on.count(host) for host in set(on))
        is_pair = len(ranks) <= 2 and len({rank // 2 for rank in ranks}) == 1
        return self._reach(size=len(ranks), per_host=per_host, is_pair=is_pair, hosts=len(set(on)))

    def _reach(self, *, size: int, per_host: int, is_pair: bool, hosts: int | None = None) -> Reach:
        return Reach(
            size=size,
            per_host=per_host,
            hosts=-(-size // per_host) if hosts is None else hosts,
            inner=self.pair if is_pair else self.host,
            outer=self.between,
            at_once=max(1, self.devices_per_host // per_host),
        )


def _check_positive(what: str, numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        if not number > 0:
            raise ClusterError(f"{what} has {name}={number}.", fix=f"give {name} as a number above 0.")
