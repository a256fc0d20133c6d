"""What one device holds: state by precision and ZeRO stage, activations by schedule, and what comes on top.

In: the units of a rank with the micro-batches that it keeps, the plan, how wide everything is. Out: `MemoryUse`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plait.cluster.cluster import Device
from plait.plan.offload import offload_shares
from plait.plan.plan import Plan, Shards
from plait.program.write.offload import at_hand
from plait.program.write.spill import part_bytes
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
    update_is_late: bool = False
    """Whether an update must wait for all gradients, so that parts of it cannot come before the backward's end."""

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
    num_micro: int = 1
    """Micro-batches of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHeld:
    """What a device holds of gradients and optimizer state, in bytes."""

    gradients: float
    optimizer: float
    fetched: float
    """Parts of the optimizer's state that are at hand beside it."""
    moved: float
    """Optimizer state that goes to the host and comes back in every step."""
    out: float = 0.0
    """Gradients that go there, for updates that the host makes."""
    back: float = 0.0
    """Weights that come from there."""
    updated: float = 0.0
    """Elements that the host updates."""


def state_held(elements: float, plan: Plan, state: StateBytes, num_micro: int) -> StateHeld:
    """All of it, or what `memory.offload` leaves."""
    shares = offload_shares(plan.memory.offload)
    on_host = shares.get("gradients", 0.0)
    away = max(on_host, shares.get("optimizer", 0.0))
    gradients = elements * state.gradient / plan.shards.gradients
    optimizer = elements * state.optimizer / plan.shards.optimizer
    if not away:
        return StateHeld(gradients=gradients, optimizer=optimizer, fetched=0.0, moved=0.0)
    part = part_bytes(plan, int(elements * state.parameter)) or 0.0
    share = part / max(1.0, elements * state.parameter)
    own = elements / plan.shards.optimizer
    if num_micro == 1 and plan.data_ranks == 1:  # given up part by part: all, or what the host updates
        few = min(gradients, 2 * part * state.gradient / state.parameter)
        gradients = max(few, (1 - on_host) * gradients) if state.update_is_late else few
    return StateHeld(
        gradients=gradients,
        optimizer=(1 - away) * optimizer,
        fetched=min(away - on_host, at_hand(int((away - on_host) / share)) * share) * optimizer,
        moved=(away - on_host) * optimizer,
        out=on_host * own * state.gradient,
        back=on_host * own * state.parameter,
        updated=on_host * own,
    )


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
    constants, held_state = device.calibration, state_held(elements, plan, state, held.num_micro)
    return MemoryUse(
        parameters=elements * state.parameter / plan.shards.parameters,
        gradients=held_state.gradients,
        optimizer=held_state.optimizer,
        activations=activations,
        buffers=transient + gathered + travelling + held_state.fetched,
        overhead=constants.reserve_bytes + constants.fragmentation * (activations + transient),
    )
