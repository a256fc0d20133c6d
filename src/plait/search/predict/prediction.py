"""What a plan is expected to cost, before anything runs.

In: nothing; the makers are `sketch.py` and the simulator of compiled programs. Out: a `Prediction`. Never says more
than it was given: rates and shares are derived here, once, from times, FLOPs and bytes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.cluster.cluster import Cluster
from plait.plan.plan import PIPE, Plan
from plait.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """The most that one device holds at once, by kind, in bytes."""

    parameters: float
    """Weights as they are computed with, and their master copies where the optimizer keeps some."""
    gradients: float
    """Gradients that live through the step."""
    optimizer: float
    """State of the optimizer."""
    activations: float
    """What the forward keeps for the backward, of all micro-batches in flight."""
    buffers: float
    """What exists for a while: gathered parameters, the logits of the loss, transients of one op."""
    overhead: float
    """Context of the device, buffers of communication, pieces that the allocator cannot use."""

    @property
    def total(self) -> float:
        """All kinds together."""
        kept = self.parameters + self.gradients + self.optimizer
        return kept + self.activations + self.buffers + self.overhead


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One training step of a job under a plan on a cluster."""

    plan: Plan
    """How the job would be run."""
    cluster: Cluster
    """With what."""
    batch: int
    """Samples a step, over all ranks."""
    micro_batch: int
    """Samples that one rank of `data` computes at once."""
    step_s: float
    """One training step."""
    model_flops: float
    """FLOPs of the model's forward and backward for the batch; what is computed again is not counted."""
    bubble: float
    """The share of the step in which devices wait for other stages of the pipeline, from 0 to 1."""
    exposed_s: float
    """Time of a step in which a device only communicates."""
    sent_bytes: Mapping[str, float]
    """Bytes that a device sends in a step, by mesh axis."""
    memory: MemoryUse
    """Of the device that needs most."""
    limit_bytes: float
    """Memory that a device may use."""
    peak_flops: float
    """What one device could do in a second, in the precision of the matrix products."""

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks in a second."""
        return self.batch / self.step_s

    @property
    def utilization(self) -> float:
        """Model FLOPs over what the devices could have done (MFU), from 0 to 1."""
        return self.model_flops / (self.step_s * self.peak_flops * self.plan.mesh.size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step: what the job's `accumulate` must be."""
        return max(1, self.batch // (self.micro_batch * self.plan.data_ranks))

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory.total <= self.limit_bytes

    @property
    def reason(self) -> str | None:
        """Why the plan is rejected; None where it fits."""
        if self.fits:
            return None
        return f"needs {format_bytes(self.memory.total)} of {format_bytes(self.limit_bytes)}"

    @property
    def cost_per_step(self) -> float | None:
        """Money, where the cluster has a price."""
        price = self.cluster.price_per_hour
        return None if price is None else price * self.plan.mesh.size * self.step_s / 3600

    def as_json(self) -> dict[str, Any]:
        """As plain values, for programs to read: the same keys wherever a prediction is told."""
        plan = self.plan
        return {
            "plan": plan.name,
            "mesh": dict(plan.mesh.axes),
            "zero": plan.memory.zero,
            "recompute": plan.memory.recompute,
            "offload": plan.memory.offload,
            "schedule": plan.pipe.schedule if plan.mesh.size_of(PIPE) > 1 else None,
            "stages_a_rank": plan.pipe.per_rank,
            "sequence": plan.tensor.sequence,
            "cluster": self.cluster.name,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "accumulate": self.num_micro_batches,
            "step_s": self.step_s,
            "samples_per_s": self.samples_per_s,
            "utilization": self.utilization,
            "bubble": self.bubble,
            "exposed_s": self.exposed_s,
            "sent_bytes": dict(self.sent_bytes),
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "reason": self.reason,
            "cost_per_step": self.cost_per_step,
            "yaml": plan.to_yaml(),
        }
