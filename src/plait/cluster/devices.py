"""Devices by their data sheets, in hosts as they are usually built.

In: nothing. Out: `DEVICES`. Rates are dense (no sparsity), with sums in 32 bits; memory is what the driver shows; a
link's bandwidth is per device and direction. How far real programs stay below is in `calibration.py`: it was fitted on
A100 and H100 alone, and every other device takes the constants of the one nearer in age.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.cluster.calibration import AMPERE, HOPPER, Calibration
from plait.cluster.cluster import Cluster, Device, Link

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
    source: str
    """Where the numbers stand."""

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


_TO_HOST_GB = {
    **dict.fromkeys(("V100", "T4", "K80"), 12.0),
    **dict.fromkeys(("H100", "H100-PCIe", "H200", "B200", "RTX5090", "RTX-PRO-6000", "MI300X"), 50.0),
    **dict.fromkeys(("GH200", "GB200"), 300.0),
}
"""GB/s to the host's memory: PCIe 3 or 5 less headers, NVLink to a Grace of its own; all others: PCIe 4, 25."""


def _device(
    name: str, memory_mib: int, bandwidth_gb: float, calibration: Calibration, **tera_flops: float
) -> Device:
    return Device(
        name=name,
        memory_bytes=memory_mib * _MIB,
        peak_flops={dtype: rate * 1e12 for dtype, rate in tera_flops.items()},
        memory_bandwidth=bandwidth_gb * 1e9,
        host_bandwidth=_TO_HOST_GB.get(name, 25.0) * 1e9,
        calibration=calibration,
    )


def _link(latency_us: float, gb_per_s: float, *, in_network: bool = False, shared: bool = False) -> Link:
    return Link(latency_s=latency_us * 1e-6, bandwidth=gb_per_s * 1e9, in_network=in_network, shared=shared)


_PCIE3 = _link(10, 12)
"""Sixteen lanes, between two devices behind one switch: 15.75 GB/s less headers."""
_PCIE4 = _link(8, 25)
"""The same, 31.5 GB/s less headers."""
_PCIE5 = _link(7, 50)
"""The same, 63 GB/s less headers."""
_BRIDGE = _link(6, 56.25)
"""A bridge of four NVLink 3 between two cards: 112.5 GB/s in both directions together."""
_ETHERNET = _link(30, 1.25, shared=True)
"""10 Gb/s for the whole host: what stands beside a workstation."""
_ETHERNET_25 = _link(30, 3.125, shared=True)
"""25 Gb/s for the whole host: the usual adapter of a server with cards."""

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

DEVICES: Mapping[str, Preset] = {
    "V100": Preset(
        device=_V100, devices_per_host=8, host=_link(6, 150), between=_link(8, 6.25),
        source="NVIDIA V100 data sheet; DGX-1: six NVLink 2 of 25 GB/s a device, four EDR adapters (100 Gb/s) a host",
    ),
    "V100-16": Preset(
        device=replace(_V100, name="V100-16", memory_bytes=16384 * _MIB),
        devices_per_host=8, host=_link(6, 150), between=_link(8, 6.25), source="as V100, of 16 GB",
    ),
    "A100-40": Preset(
        device=replace(_A100, name="A100-40", memory_bytes=40960 * _MIB, memory_bandwidth=1555e9),
        devices_per_host=8, host=_link(5, 300), between=_link(7, 25),
        source="NVIDIA A100 data sheet; DGX A100: NVSwitch at 300 GB/s, eight HDR adapters (200 Gb/s)",
    ),
    "A100-80": Preset(
        device=_A100, devices_per_host=8, host=_link(5, 300), between=_link(7, 25), source="as A100-40, of 80 GB",
    ),
    "H100": Preset(
        device=_device("H100", 81559, 3352, HOPPER, **_HOPPER),
        devices_per_host=8, host=_link(4, 450, in_network=True), between=_link(6, 50),
        source="NVIDIA H100 data sheet (SXM); DGX H100: NVSwitch at 450 GB/s that adds up (NVLS), eight NDR adapters",
    ),
    "H100-PCIe": Preset(
        device=_device(
            "H100-PCIe", 81559, 2039, HOPPER,
            float64=51.2, float32=51.2, tf32=378, bfloat16=756, float16=756, float8=1513,
        ),
        devices_per_host=8, pair=_link(5, 300), host=_PCIE5, between=_link(8, 12.5),
        source="NVIDIA H100 data sheet (PCIe); bridges of 600 GB/s between two cards, 100 Gb/s a card",
    ),
    "H200": Preset(
        device=_device("H200", 143771, 4800, HOPPER, **_HOPPER),
        devices_per_host=8, host=_link(4, 450, in_network=True), between=_link(6, 50),
        source="NVIDIA H200 data sheet; DGX H200 as DGX H100",
    ),
    "GH200": Preset(
        device=_device("GH200", 97871, 4000, HOPPER, **_HOPPER),
        devices_per_host=1, host=_link(4, 450), between=_link(6, 50),
        source="NVIDIA GH200 data sheet, the one of 96 GB; one a host, an NDR adapter (400 Gb/s)",
    ),
    "B200": Preset(
        device=_device("B200", 183359, 7700, HOPPER, **_BLACKWELL),
        devices_per_host=8, host=_link(4, 900, in_network=True), between=_link(6, 50),
        source="NVIDIA DGX B200 data sheet: NVSwitch at 900 GB/s, eight NDR adapters",
    ),
    "GB200": Preset(
        device=_device(
            "GB200", 189471, 8000, HOPPER, float64=40, float32=80, tf32=1250, bfloat16=2500, float16=2500, float8=5000
        ),
        devices_per_host=72, host=_link(4, 900, in_network=True), between=_link(6, 50),
        source="NVIDIA GB200 NVL72 data sheet: a rack of 72 behind NVSwitches counts as a host; 400 Gb/s a device",
    ),
    "T4": Preset(
        device=_device("T4", 15360, 320, AMPERE, float32=8.1, float16=65),
        devices_per_host=4, host=_PCIE3, between=_ETHERNET_25, source="NVIDIA T4 data sheet; PCIe 3",
    ),
    "L4": Preset(
        device=_device(
            "L4", 23034, 300, HOPPER, float32=30.3, tf32=60, bfloat16=121, float16=121, float8=242
        ),
        devices_per_host=8, host=_PCIE4, between=_ETHERNET_25,
        source="NVIDIA L4 data sheet (half of its sparse rates); PCIe 4",
    ),
    "A10": Preset(
        device=_device("A10", 23028, 600, AMPERE, float32=31.2, tf32=62.5, bfloat16=125, float16=125),
        devices_per_host=4, host=_PCIE4, between=_ETHERNET_25, source="NVIDIA A10 data sheet; PCIe 4",
    ),
    "A10G": Preset(
        device=_device("A10G", 23028, 600, AMPERE, float32=31.5, tf32=35, bfloat16=70, float16=70),
        devices_per_host=8, host=_PCIE4, between=_ETHERNET_25,
        source="NVIDIA A10G data sheet (AWS alone has it); PCIe 4",
    ),
    "A40": Preset(
        device=_device("A40", 46068, 696, AMPERE, float32=37.4, tf32=74.8, bfloat16=149.7, float16=149.7),
        devices_per_host=8, pair=_BRIDGE, host=_PCIE4, between=_ETHERNET_25,
        source="NVIDIA A40 data sheet; PCIe 4, bridges between pairs",
    ),
    "L40S": Preset(
        device=_device(
            "L40S", 46068, 864, HOPPER, float32=91.6, tf32=183, bfloat16=362, float16=362, float8=733
        ),
        devices_per_host=8, host=_PCIE4, between=_ETHERNET_25, source="NVIDIA L40S data sheet; PCIe 4",
    ),
    "RTX3090": Preset(
        device=_device("RTX3090", 24576, 936, AMPERE, float32=35.6, tf32=35.6, bfloat16=71, float16=71),
        devices_per_host=4, pair=_BRIDGE, host=_link(15, 12), between=_ETHERNET,
        source="NVIDIA GA102 white paper; bridges between pairs, else PCIe 4 through the host's memory (half its rate)",
    ),
    "RTX4090": Preset(
        device=_device(
            "RTX4090", 24564, 1008, HOPPER, float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2, float8=330.3
        ),
        devices_per_host=4, host=_link(15, 12), between=_ETHERNET,
        source="NVIDIA Ada white paper; no peer access: PCIe 4 through the host's memory (half of its rate)",
    ),
    "RTX5090": Preset(
        device=_device(
            "RTX5090", 32607, 1792, HOPPER, float32=104.8, tf32=104.8, bfloat16=209.5, float16=209.5, float8=419
        ),
        devices_per_host=4, host=_link(15, 25), between=_ETHERNET,
        source="NVIDIA RTX Blackwell white paper; no peer access: PCIe 5 through the host's memory (half of its rate)",
    ),
    "RTX-A6000": Preset(
        device=_device("RTX-A6000", 49140, 768, AMPERE, float32=38.7, tf32=77.4, bfloat16=154.8, float16=154.8),
        devices_per_host=4, pair=_BRIDGE, host=_PCIE4, between=_ETHERNET,
        source="NVIDIA RTX A6000 data sheet, GA102 white paper; bridges between pairs",
    ),
    "RTX6000-Ada": Preset(
        device=_device(
            "RTX6000-Ada", 49140, 960, HOPPER, float32=91.1, tf32=182.1, bfloat16=364.2, float16=364.2, float8=728.5
        ),
        devices_per_host=4, host=_PCIE4, between=_ETHERNET,
        source="NVIDIA RTX 6000 Ada data sheet, Ada white paper; PCIe 4",
    ),
    "RTX-PRO-6000": Preset(
        device=_device(
            "RTX-PRO-6000", 97887, 1792, HOPPER, float32=126, tf32=251.9, bfloat16=503.8, float16=503.8, float8=1007.6
        ),
        devices_per_host=8, host=_PCIE5, between=_ETHERNET_25,
        source="NVIDIA RTX PRO 6000 Blackwell data sheet (600 W), RTX Blackwell PRO white paper; PCIe 5",
    ),
    "MI250": Preset(
        device=_device(
            "MI250", 65520, 1638, AMPERE, float64=45.3, float32=45.3, bfloat16=181, float16=181
        ),
        devices_per_host=8, pair=_link(8, 200), host=_link(8, 50), between=_link(8, 12.5),
        source="AMD MI250 data sheet: one of a module's two dies, which the driver shows as a device; Infinity Fabric",
    ),
    "MI300X": Preset(
        device=_device(
            "MI300X", 196592, 5300, HOPPER,
            float64=163.4, float32=163.4, tf32=653.7, bfloat16=1307.4, float16=1307.4, float8=2614.9,
        ),
        devices_per_host=8, host=_link(6, 448), between=_link(6, 50),
        source="AMD MI300X data sheet: seven Infinity Fabric links of 64 GB/s, an adapter of 400 Gb/s a device",
    ),
    "K80": Preset(
        device=_device("K80", 11441, 240, AMPERE, float64=0.935, float32=2.8),
        devices_per_host=8, pair=_link(10, 10), host=_link(15, 10), between=_link(50, 1.25, shared=True),
        source="NVIDIA K80 board specification: one GK210 of its two, at the base clock; PCIe 3 behind switches, "
        "through which neighbours of a ring send at once; 10 Gb/s a host (AWS p2.8xlarge)",
    ),
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
        source="one core of a server, roughly; ranks of a host meet in shared memory. `plait measure` knows better",
    ),
}  # fmt: skip
"""By name; `A100` alone means the one of 80 GB."""
