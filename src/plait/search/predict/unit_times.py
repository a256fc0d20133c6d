"""How long a unit of a model takes on one device.

In: a unit's costs, the samples of a micro-batch, what is computed again, the device and what the `tensor` axis crosses.
Out: `UnitTimes`. The host starts kernels while the device works: a pass takes about as long as the slower of the two.
"""

from dataclasses import dataclass

from plait.cluster.cluster import Device, Reach
from plait.program.cost.collective_time import CollectiveSeconds
from plait.program.cost.op_time import op_seconds
from plait.search.predict.model_costs import OpCost, UnitCosts

_SHARPNESS = 4
"""Where both take equally long, a pass takes 2^(1/4) times that: some ops wait for the host, some for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTimes:
    """Seconds of one micro-batch."""

    forward_s: float
    input_s: float
    """Of the backward: what the units before wait for, and what is computed again."""
    weight_s: float
    """Of the backward: gradients of parameters alone."""
    exposed_s: float
    """Of all three: communication inside of the unit, in which nothing is computed."""
    sent_bytes: float
    """Bytes that a device sends along `tensor`."""

    @property
    def backward_s(self) -> float:
        """Both parts."""
        return self.input_s + self.weight_s


def unit_times(
    unit: UnitCosts, samples: float, setting: str, device: Device, reach: Reach, collective: CollectiveSeconds
) -> UnitTimes:
    """The passes of a unit with `setting` of recompute."""
    device_s = {"forward": 0.0, "input": 0.0, "weight": 0.0}
    host_s = dict.fromkeys(device_s, 0.0)
    exposed_s = sent = 0.0
    part = (reach.size - 1) / reach.size
    for step in unit.steps:
        times = 2 if setting in step.again else 1
        if isinstance(step, OpCost):
            seconds = op_seconds(step.work(samples), device)
        else:
            num_bytes = step.num_bytes.at(samples)
            seconds = collective(step.kind, num_bytes, reach, device)
            exposed_s += seconds * times
            sent += num_bytes * part * times * (2 if step.kind == "all_reduce" else 1)
        device_s[step.phase] += seconds
        host_s[step.phase] += device.calibration.host_s
        if times == 2:
            device_s["input"] += seconds
            host_s["input"] += device.calibration.host_s
    backward_s = device_s["input"] + device_s["weight"]
    slower = beside(backward_s, host_s["input"] + host_s["weight"]) / backward_s if backward_s else 1.0
    return UnitTimes(
        forward_s=beside(device_s["forward"], host_s["forward"]),
        input_s=device_s["input"] * slower,
        weight_s=device_s["weight"] * slower,
        exposed_s=exposed_s,
        sent_bytes=sent,
    )


def beside(device_s: float, host_s: float) -> float:
    """Time of a pass on a device that takes `device_s`, started op by op by a host that takes `host_s`."""
    slower, quicker = max(device_s, host_s), min(device_s, host_s)
    return slower * (1 + (quicker / slower) ** _SHARPNESS) ** (1 / _SHARPNESS) if slower else 0.0
