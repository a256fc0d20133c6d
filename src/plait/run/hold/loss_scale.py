"""The factor by which a loss is multiplied so that gradients in float16 do not vanish.

In: whether the norm of a step's gradients was finite, which all ranks know alike. Out: the factor of the next step. It
starts high, halves with every step whose gradients overflow (which is skipped), and doubles after many that did not.
"""

import math
from typing import Annotated, Any

import msgspec

from plait.errors import CheckpointError, RunError
from plait.files.document import Document, Format
from plait.files.shape import shaped

_FIRST = 2.0**16
"""As torch's GradScaler begins."""
_DOUBLE_AFTER = 2000
"""Steps in a row without overflow, as torch's GradScaler does."""
_LEAST = 2.0**-24
"""With a smaller factor the gradients are not too large, they are broken."""


_FORMAT = Format(noun="a loss scale", error=CheckpointError, fix="take another checkpoint.")


class _Saved(msgspec.Struct):
    factor: Annotated[float, msgspec.Meta(ge=_LEAST, le=2.0**127)]
    good: Annotated[int, msgspec.Meta(ge=0, lt=_DOUBLE_AFTER)]
    skipped: Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class LossScale:
    """One rank's copy; all are alike."""

    def __init__(self) -> None:
        self.factor = _FIRST
        self.skipped = 0
        """Steps so far that changed nothing."""
        self._good = 0
        """Steps in a row that did."""

    def takes(self, norm: float) -> bool:
        """Whether a step with this norm of its gradients is made; the factor follows."""
        if math.isfinite(norm):
            self._good += 1
            if self._good == _DOUBLE_AFTER:
                self.factor, self._good = 2 * self.factor, 0
            return True
        self.factor, self._good, self.skipped = self.factor / 2, 0, self.skipped + 1
        if self.factor < _LEAST:
            raise RunError(
                f"{self.skipped} steps had gradients that are not finite, down to a loss scale of {self.factor:g}.",
                fix="check the data for NaN, lower the learning rate, or use precision='bf16'.",
            )
        return False

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"factor": self.factor, "good": self._good, "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """From one."""
        found = shaped(Document(values=state, where="the saved loss scale"), _Saved, _FORMAT)
        self.factor, self._good, self.skipped = found.factor, found.good, found.skipped
