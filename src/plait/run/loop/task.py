"""What every rank of a run is told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.job.job import Job
from plait.options import Emulation
from plait.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every rank is told."""

    job: Job
    plan: Plan
    folder: Path
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    limit_bytes: int | None = None
    """Memory that a rank may use; None: nobody knows."""
    stop_step: int | None = None
    """Train up to, not including, this step; None: to the end of the job."""
    resume: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_timeout_s: float = 120.0
    keep: int = 2
    """Checkpoints to keep."""
    keep_best: str | None = None
    """The metric whose best checkpoint is kept too, as the user wrote it."""
    tell_every_step: bool = False
    """Somebody wants to hear of every step, not only of some."""
    record_samples: bool = False
    record_gradients: bool = False
    """Write every step's gradients to the folder, for verification."""
    trace: bool = True
    clock_offset_ns: int | None = None
    hang_s: float = 300.0
    compare_every: int = 100
    """Compare the weights of ranks every so many steps; 0: only before a checkpoint."""
    spike: float | None = None
    """A loss over so many times the usual one is taken for a bad one."""
    detect_nan: bool = False
    """Look for NaN after each segment."""
    leave_out: frozenset[int] = frozenset()
    """Steps that are not trained, whose samples are lost."""
    outlives: bool = False
    """Whether the run goes on when ranks are lost, so that those that are left must know what they need for it."""
    attempt: int = 0
    """How often ranks were started before, in this run."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Ranks that are to take so many times as long to compute as they need."""
    emulation: Emulation | None = None
    """The network that there is to be between ranks."""
    num_samples: int | None = None
    """Of the data; None: it is a stream."""

    def kept(self, progress: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint says of the run beside its state, for whoever goes on with it."""
        job = self.job
        told = {
            name: getattr(job, name) for name in ("seed", "batch", "epochs", "steps", "shuffle", "drop_last")
        }
        return told | {"num_samples": self.num_samples, "progress": dict(progress), "plan": self.plan.name}

    @property
    def holds_all(self) -> bool:
        """Whether one rank alone can hold all that is trained: a copy of it, what workers agreed on when they met last,
        or, of a server that updates once a step, everything."""
        plan, agreement = self.plan, self.plan.agreement
        if agreement.averages:
            return agreement.fragments == 1
        if agreement.weights == "server":
            return agreement.order == "step" and plan.sync.servers == 1
        return agreement.marches and plan.data_ranks == plan.ranks and not plan.memory.zero

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other: longer than the launcher's patience, which knows more about a hang."""
        return 2 * self.hang_s + 60
