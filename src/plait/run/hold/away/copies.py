"""What ranks hold copies of: equal parts of one tensor are equal on all ranks, after every step.

In: the states of ranks. Out: the parts by name and place, and how far copies are apart.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from plait.plan.plan import PIPE
from plait.program.layout import Layout
from plait.run.hold.state import ModelState
from plait.torch_private.wrappers import in_parts


def has_current(layout: Layout | None, buffer: str, rank: int) -> bool:
    """Whether a rank has the current value of a buffer."""
    return layout is None or layout.mesh.coordinate(rank, PIPE) == layout.buffer_owners.get(buffer, 0)


def copies_of(state: ModelState, rank: int) -> dict[str, Tensor]:
    """Parameters and current buffers of a rank, named by the tensor and by which part of it this is."""
    layout = state.holding.layout if state.holding is not None else None
    found = {f"{name}@": b for name, b in state.buffers.items() if has_current(layout, name, rank)}
    for name, parameter in state.parameters.items():
        place: list[str] = []
        if layout is not None:
            own = zip(layout.mesh.axes, layout.mesh.coordinates(rank), strict=True)
            cut = [axis for axis in layout.cut_axes(name) if axis != PIPE]  # tied parameters are equal
            place = [str(at) for (axis, _), at in own if axis in cut]
        found[f"{name}@{','.join(place)}"] = parameter.detach()
    return in_parts(found)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two numbers at one place; infinite where they cannot be compared.

    Equal infinities, and NaN on both sides, are no difference.
    """
    if ours.shape != theirs.shape:
        return math.inf
    if ours.is_complex() and theirs.is_complex():
        ours, theirs = torch.view_as_real(ours.detach()), torch.view_as_real(theirs.detach())
    a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    apart = (a - b)[~same].abs()
    return float(apart.max()) if bool(apart.isfinite().all()) else math.inf


def spread(held: Iterable[Mapping[str, Tensor]]) -> float:
    """The largest difference between two copies."""
    first: dict[str, Tensor] = {}
    pairs = [(first.setdefault(name, tensor), tensor) for entries in held for name, tensor in entries.items()]
    return max((distance(one, other) for one, other in pairs if one is not other), default=0.0)
