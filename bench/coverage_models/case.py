"""A case of the coverage sweep: a model small enough to be tried in seconds, with samples and what is minimized."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is tried."""

    model: Callable[[], nn.Module]
    """Builds the network."""
    samples: Sequence[Mapping[str, Tensor]]
    """The data, a dict of tensors a sample."""
    objective: Callable[[Any, Any], Tensor]
    """(model, batch) -> scalar."""
    note: str
    """What was built: class, sizes."""


class UnbuildableError(Exception):
    """No small version of it could be made by rule: it is no case."""
