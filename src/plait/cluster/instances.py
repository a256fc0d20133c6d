"""Hosts that clouds rent, by the clouds' own names.

In: nothing. Out: `INSTANCES`: a device, how many of it, and the host's network. What is not said here (links inside the
host, memory, rates) is the device's, see `devices.py`. The network is what the cloud's page of the machine type states
for all devices together; each has an equal share of it.
"""

from collections.abc import Mapping
from dataclasses import replace

from plait.cluster.cluster import Link
from plait.cluster.devices import DEVICES, Preset

_LATENCY_S = 15e-6
"""Of a message between two virtual machines with the cloud's own fast adapter (EFA, gVNIC): 10 to 20 microseconds."""
_INFINIBAND_S = 6e-6
"""Of a message over InfiniBand adapters, as in `devices.py`."""
_BITS = 1e9 / 8
"""Bytes per second of a Gb/s."""


def _hosts(
    cloud: str, device: str, hosts: Mapping[str, tuple[int, float]], latency_s: float = _LATENCY_S
) -> dict[str, Preset]:
    return {
        name: replace(
            DEVICES[device],
            devices_per_host=count,
            between=Link(latency_s=latency_s, bandwidth=gigabits * _BITS / count),
            source=f"{cloud}: {count} x {device}, {gigabits:g} Gb/s a host; {device} as its own preset",
        )
        for name, (count, gigabits) in hosts.items()
    }


INSTANCES: Mapping[str, Preset] = {
    **_hosts("AWS", "K80", {"p2.xlarge": (1, 1.25), "p2.8xlarge": (8, 10), "p2.16xlarge": (16, 25)}, 50e-6),
    **_hosts("AWS", "V100-16", {"p3.2xlarge": (1, 10), "p3.8xlarge": (4, 10), "p3.16xlarge": (8, 25)}, 30e-6),
    **_hosts("AWS", "V100", {"p3dn.24xlarge": (8, 100)}),
    **_hosts("AWS", "A100-40", {"p4d.24xlarge": (8, 400)}),
    **_hosts("AWS", "A100-80", {"p4de.24xlarge": (8, 400)}),
    **_hosts("AWS", "H100", {"p5.4xlarge": (1, 100), "p5.48xlarge": (8, 3200)}),
    **_hosts("AWS", "H200", {"p5e.48xlarge": (8, 3200), "p5en.48xlarge": (8, 3200)}),
    **_hosts("AWS", "B200", {"p6-b200.48xlarge": (8, 3200)}),
    **_hosts("AWS", "T4", {"g4dn.xlarge": (1, 5), "g4dn.12xlarge": (4, 50), "g4dn.metal": (8, 100)}),
    **_hosts("AWS", "A10G", {"g5.xlarge": (1, 2.5), "g5.12xlarge": (4, 40), "g5.48xlarge": (8, 100)}),
    **_hosts("AWS", "L4", {"g6.xlarge": (1, 2.5), "g6.12xlarge": (4, 40), "g6.48xlarge": (8, 100)}),
    **_hosts("AWS", "L40S", {"g6e.xlarge": (1, 2.5), "g6e.12xlarge": (4, 100), "g6e.48xlarge": (8, 400)}),
    **_hosts(
        "Google Cloud", "A100-40",
        {"a2-highgpu-1g": (1, 24), "a2-highgpu-2g": (2, 32), "a2-highgpu-4g": (4, 50), "a2-highgpu-8g": (8, 100),
         "a2-megagpu-16g": (16, 100)},
    ),
    **_hosts(
        "Google Cloud", "A100-80",
        {"a2-ultragpu-1g": (1, 24), "a2-ultragpu-4g": (4, 50), "a2-ultragpu-8g": (8, 100)},
    ),
    **_hosts("Google Cloud", "H100", {"a3-highgpu-8g": (8, 800), "a3-megagpu-8g": (8, 1600)}),
    **_hosts("Google Cloud", "H200", {"a3-ultragpu-8g": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Google Cloud", "B200", {"a4-highgpu-8g": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Google Cloud", "L4", {"g2-standard-4": (1, 10), "g2-standard-48": (4, 50), "g2-standard-96": (8, 100)}),
    **_hosts("Azure", "V100-16", {"NC6s_v3": (1, 24), "NC24s_v3": (4, 24)}, 30e-6),
    **_hosts("Azure", "V100", {"ND40rs_v2": (8, 100)}, _INFINIBAND_S),
    **_hosts("Azure", "A100-40", {"ND96asr_v4": (8, 1600)}, _INFINIBAND_S),
    **_hosts("Azure", "A100-80", {"ND96amsr_A100_v4": (8, 1600)}, _INFINIBAND_S),
    **_hosts("Azure", "H100", {"ND96isr_H100_v5": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Azure", "H200", {"ND96isr_H200_v5": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Azure", "MI300X", {"ND96isr_MI300X_v5": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Azure", "T4", {"NC4as_T4_v3": (1, 8), "NC64as_T4_v3": (4, 32)}, 30e-6),
    **_hosts("Oracle", "A100-40", {"BM.GPU4.8": (8, 1600)}, _INFINIBAND_S),
    **_hosts("Oracle", "A100-80", {"BM.GPU.A100-v2.8": (8, 1600)}, _INFINIBAND_S),
    **_hosts("Oracle", "H100", {"BM.GPU.H100.8": (8, 3200)}, _INFINIBAND_S),
    **_hosts("Oracle", "MI300X", {"BM.GPU.MI300X.8": (8, 3200)}, _INFINIBAND_S),
}  # fmt: skip
"""By name; a host has all of its devices unless told otherwise."""
