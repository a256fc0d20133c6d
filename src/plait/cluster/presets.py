"""Clusters that people name: devices by their data sheets, in hosts as they are usually built.

In: a device's name. Out: a `Cluster` of any number of hosts. Rates are dense (no sparsity); memory is what the driver
shows; a link's bandwidth is per device and direction. How far real programs stay below is in `calibration.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.cluster.calibration import AMPERE, HOPPER, Calibration
from plait.cluster.cluster import Cluster, Device, Link
from plait.errors import ClusterError

_MIB = 2**20
"""Bytes; data sheets and `nvidia-smi` tell memory in these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A device and the host around it."""

    device: Device
    """One of the host's devices."""
    devices_per_host: int
    """As such hosts are sold."""
    host: Link
    """Between devices of a host."""
    between: Link
    """Between hosts, a device's share."""
    pair: Link | None = None
    """Between neighbours, where they are closer than others; None: as all of the host."""

    def cluster(self, name: str, hosts: int, devices_per_host: int) -> Cluster:
        """So many such hosts."""
        return Cluster(
            name=name,
            device=self.device,
            hosts=hosts,
            devices_per_host=devices_per_host,
            pair=self.pair or self.host,
            host=self.host,
            between=self.between,
        )


def _device(
    name: str, memory_mib: int, bandwidth_gb: float, calibration: Calibration, **tera_flops: float
) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_mib * _MIB,
        peak_flops={dtype: rate * 1e12 for dtype, rate in tera_flops.items()},
        memory_bandwidth=bandwidth_gb * 1e9,
        calibration=calibration,
    )


def _link(latency_us: float, gb_per_s: float, *, in_network: bool = False, shared: bool = False) -> Link:
    return Link(latency_s=latency_us * 1e-6, bandwidth=gb_per_s * 1e9, in_network=in_network, shared=shared)


_V100 = _device("V100", 32768, 900, AMPERE, float64=7.8, float32=15.7, float16=125)
_A100 = _device(
    "A100-80", 81920, 2039, AMPERE, float64=19.5, float32=19.5, tf32=156, bfloat16=312, float16=312
)
_HOPPER = {
    "float64": 67.0,
    "float32": 67.0,
    "tf32": 494.7,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8": 1978.9,
}
_BLACKWELL = {
    "float64": 37.0,
    "float32": 75.0,
    "tf32": 1125.0,
    "bfloat16": 2250.0,
    "float16": 2250.0,
    "float8": 4500.0,
}

_CPU = Calibration(
    matmul_share=0.9,
    matmul_tiles=0.0,
    matmul_depth=16.0,
    attention_share=0.5,
    kernel_s=5e-6,
    host_s=0.0,
    link_share=1.0,
    step_s=1e-3,
    reserve_bytes=3e8,
    fragmentation=1.0,  # the C library's heap, which keeps what is freed
)

PRESETS: Mapping[str, Preset] = {
    # DGX-1 (V100): six NVLink 2 of 25 GB/s a device; four EDR adapters (100 Gb/s) a host.
    "V100": Preset(device=_V100, devices_per_host=8, host=_link(6, 150), between=_link(8, 6.25)),
    "V100-16": Preset(
        device=replace(_V100, name="V100-16", memory_bytes=16384 * _MIB),
        devices_per_host=8,
        host=_link(6, 150),
        between=_link(8, 6.25),
    ),
    # DGX A100: NVSwitch at 300 GB/s; eight HDR adapters (200 Gb/s).
    "A100-40": Preset(
        device=replace(_A100, name="A100-40", memory_bytes=40960 * _MIB, memory_bandwidth=1555e9),
        devices_per_host=8,
        host=_link(5, 300),
        between=_link(7, 25),
    ),
    "A100-80": Preset(device=_A100, devices_per_host=8, host=_link(5, 300), between=_link(7, 25)),
    # DGX H100, H200: NVSwitch at 450 GB/s that adds up (NVLS); eight NDR adapters (400 Gb/s).
    "H100": Preset(
        device=_device("H100", 81559, 3352, HOPPER, **_HOPPER),
        devices_per_host=8,
        host=_link(4, 450, in_network=True),
        between=_link(6, 50),
    ),
    "H200": Preset(
        device=_device("H200", 143771, 4800, HOPPER, **_HOPPER),
        devices_per_host=8,
        host=_link(4, 450, in_network=True),
        between=_link(6, 50),
    ),
    # DGX B200: NVSwitch at 900 GB/s; eight NDR adapters.
    "B200": Preset(
        device=_device("B200", 183359, 7700, HOPPER, **_BLACKWELL),
        devices_per_host=8,
        host=_link(4, 900, in_network=True),
        between=_link(6, 50),
    ),
    # One GK210 of the two on a K80 board, at its base clock; boards on PCIe 3 behind switches, through which neighbours
    # of a ring send at once; 10 Gb/s a host (AWS p2.8xlarge).
    "K80": Preset(
        device=_device("K80", 11441, 240, AMPERE, float64=0.935, float32=2.8),
        devices_per_host=8,
        pair=_link(10, 10),
        host=_link(15, 10),
        between=_link(50, 1.25, shared=True),
    ),
    # One core of a server; ranks of a host meet in shared memory. `plait measure` knows better.
    "cpu": Preset(
        device=Device(
            name="cpu",
            memory_bytes=8192 * _MIB,
            peak_flops={"float64": 30e9, "float32": 60e9},
            memory_bandwidth=10e9,
            calibration=_CPU,
        ),
        devices_per_host=8,
        host=Link(latency_s=20e-6, bandwidth=4e9, shared=True, background=False),
        between=_link(100, 1.25, shared=True),
    ),
}
"""By name; `A100` alone means the one of 80 GB."""

_ALIASES = {"A100": "A100-80", "V100-32": "V100", "H100-80": "H100", "CPU": "cpu"}


def preset(name: str) -> Preset:
    """The preset of this name, whatever its case."""
    known = {key.upper(): key for key in PRESETS}
    wanted = _ALIASES.get(name.upper(), known.get(name.upper()))
    if wanted is None:
        raise ClusterError(
            f"there is no device {name!r}.",
            fix=f"use one of {', '.join(PRESETS)}, or describe the cluster in a YAML file.",
        )
    return PRESETS[wanted]
