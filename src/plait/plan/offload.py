"""What a plan keeps in the host's memory, for want of room on the device.

In: `memory.offload` as a person or the search wrote it. Out: shares by kind. Never looks at the model: which tensors go
is decided where the step is compiled.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from plait.errors import PlanError

OffloadKind = Literal["optimizer", "gradients", "parameters", "activations"]
OFFLOAD_KINDS: tuple[str, ...] = get_args(OffloadKind)
"""What can lie on the host: the optimizer's state, gradients until their update, parameters where nobody reads them,
what the forward keeps for the backward."""
_FIX = (
    "use none, auto, or a list of optimizer, gradients, parameters, activations, each with a share if not all of it "
    "is meant: [optimizer:0.5]."
)


def checked_offload(given: object) -> str | tuple[str, ...]:
    """`none`, `auto`, or entries such as `optimizer` and `activations:0.5`, each kind once."""
    if given in ("none", "auto"):
        return str(given)
    entries = (given,) if isinstance(given, str) else given
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) for entry in entries):
        raise PlanError(f"memory.offload={given!r} is no list.", fix=_FIX)
    kinds = [_entry(entry)[0] for entry in entries]
    if not kinds or len(set(kinds)) < len(kinds):
        raise PlanError(f"memory.offload={given!r} names {'a kind twice' if kinds else 'nothing'}.", fix=_FIX)
    return tuple(entries)


def offload_shares(offload: str | tuple[str, ...]) -> Mapping[str, float]:
    """The share of each kind that lies on the host; kinds of which nothing does are absent. Of `auto`, before the
    choice is made: nothing."""
    if isinstance(offload, str):
        return {}
    return {kind: share for kind, share in map(_entry, offload) if share > 0}


def _entry(entry: str) -> tuple[str, float]:
    kind, _, told = entry.partition(":")
    try:
        share = float(told) if told else 1.0
    except ValueError:
        share = -1.0
    if kind not in OFFLOAD_KINDS or not 0 <= share <= 1:
        raise PlanError(f"memory.offload: {entry!r} is unknown.", fix=_FIX)
    return kind, share
