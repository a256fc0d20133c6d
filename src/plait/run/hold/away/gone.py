"""Gradients that have left the device, until the host has made their update.

In: gradients on the host, and what is decided about all gradients meanwhile. Out: the same as they would be on the
device, when the host takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from plait.job.updates.clip import Clip
from plait.program.program import Bucket
from plait.run.hold.bounds import by_norm, clamp, entries


@dataclass(slots=True)
class Gone:
    """Those of one rank."""

    gradients: dict[Bucket, dict[str, Tensor]] = field(default_factory=dict)
    """By parameter."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """As they were on the device, where norms are bounded."""
    _factors: dict[str, Tensor] = field(default_factory=dict)
    _clip: Clip | None = None

    def leave(self, bucket: Bucket, gradients: dict[str, Tensor]) -> None:
        """They are on the host now."""
        self.gradients[bucket], self._clip = gradients, None

    def scale(self, clip: Clip, position: int | None, factor: Tensor) -> None:
        """Those of a norm of `clip`, or of none, are to be multiplied."""
        names = {name: name for bucket in self.gradients for name in bucket.parameters}
        chosen = (
            [name for name in names if clip.norm_of(name) is None]
            if position is None
            else by_norm(clip, names).get(position, [])
        )
        self._factors |= dict.fromkeys(chosen, factor)

    def clamp(self, clip: Clip) -> None:
        """All are to be bounded by values."""
        self._clip = clip

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Do it to some of them."""
        for name in gradients.keys() & self._factors.keys():
            entries([gradients[name]])[0].mul_(self._factors[name].to(gradients[name].device))
        if self._clip is not None:
            clamp(self._clip, gradients)

    def forget(self, bucket: Bucket) -> None:
        """Their update is made."""
        for name in self.gradients.pop(bucket):
            self.norms.pop(name, None)
            self._factors.pop(name, None)
