"""What one rank has of a step: its samples of each micro-batch, and where they lie in the whole."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Share:
    """One rank's samples of one micro-batch."""

    batch: Any
    """The collated samples; with none, tensors of 0 rows."""
    ids: tuple[int, ...]
    """This rank's sample ids."""
    sizes: tuple[int, ...]
    """How many samples of this micro-batch each rank has."""
    offset: int
    """Index of this rank's first sample within the micro-batch."""
    global_offset: int
    """Index of the micro-batch's first sample within the step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadedStep:
    """What one rank needs for one optimizer step."""

    step: int
    """Optimizer step, counted from 0 over the whole run."""
    epoch: int
    """Pass over the data, counted from 0."""
    ends_epoch: bool
    """Whether this is the last step of its epoch."""
    ids: Tensor
    """All ranks' sample ids of the step, in order; for a stream, positions in the epoch."""
    micro_batches: tuple[Share, ...]
    """This rank's share of each micro-batch, in order."""
    share: int = 0
    """Which share of the step it is: the rank's own, or the one that it took."""
