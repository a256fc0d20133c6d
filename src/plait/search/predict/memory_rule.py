"""What one device holds: state by precision and ZeRO stage, activations by schedule, and what comes on top.

In: the units of a rank with the micro-batches that it keeps, the plan, how wide everything is. Out: `MemoryUse`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.cluster.cluster import Device
from plait.plan.plan import Plan, Shards
from plait.search.predict.model_costs import UnitCosts
from plait.search.predict.prediction import MemoryUse


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes for each element of a parameter."""

    parameter: float = 4.0
    """The weight that ops read."""
    gradient: float = 4.0
    """As it is kept through a step."""
    optimizer: float = 8.0
    """State of the optimizer, a master copy included."""
    reduced: float = 4.0
    """A gradient on its way."""
    gathered: float = 4.0
    """A parameter on its way."""
    update: float = 28.0
    """Read and written by one optimizer step."""
    accumulate: float = 12.0
    """Read and written to add a micro-batch's gradients to those before it."""

    def held(self, shards: Shards) -> float:
        """Bytes that a rank holds for each element, where state is cut into shards."""
        return shards.held(parameters=self.parameter, gradients=self.gradient, optimizer=self.optimizer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What a rank of a pipeline has of the model."""

    units: Sequence[UnitCosts]
    """Its units, each as often as it has it, in order."""
    in_flight: float
    """Micro-batches whose activations it keeps at once, of all its units."""
    elements: float
    """Of its parameters."""


def memory_use(held: Held, samples: float, plan: Plan, state: StateBytes, device: Device) -> MemoryUse:
    """The most that a rank has at once."""
    zero, data, setting = plan.memory.zero, plan.data_ranks, str(plan.memory.recompute)
    if not isinstance(plan.memory.recompute, str):
        setting = "full"
    elements = held.elements
    largest = max((unit.parameters for unit in held.units), default=0.0)
    gathered = 2 * largest * state.gathered if zero == 3 and data > 1 else 0.0
    travelling = largest * state.reduced if zero >= 2 and data > 1 else 0.0
    kept = [unit.kept[setting].at(samples) for unit in held.units]
    all_kept = sum(kept)
    # Backwards run from the last unit to the first: what comes after is gone, what comes before is still there.
    before, most = 0.0, 0.0
    for unit, own in zip(held.units, kept, strict=True):
        most = max(most, before + max(own, unit.peak.at(samples)))
        before += own
    activations = all_kept * held.in_flight
    transient = most - all_kept
    constants = device.calibration
    return MemoryUse(
        parameters=elements * state.parameter / plan.shards.parameters,
        gradients=elements * state.gradient / plan.shards.gradients,
        optimizer=elements * state.optimizer / plan.shards.optimizer,
        activations=activations,
        buffers=transient + gathered + travelling,
        overhead=constants.reserve_bytes + constants.fragmentation * (activations + transient),
    )
