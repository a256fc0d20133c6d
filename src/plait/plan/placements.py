"""What a plan says about where tensors are along one mesh axis.

In: names with wildcards and placements as text, from a file, a pattern or the search. Out: a frozen value, and the
placement that a name gets. Whether a placement can be had is decided where the plan meets a graph, in `program/`.

    parameters: {"h.*.up.weight": S(0), "h.*.down.weight": S(1)}     held like this, and so is the optimizer state
    batch:      {"batch.0": S(2)}                                     cut like this right after it is loaded
    ops:        {"h.*.up forward addmm 1": "R R S(1) -> S(1)"}        inputs -> outputs of one op of a module
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plait.errors import PlanError

_PLACEMENT = re.compile(r"R|P|S\([0-9]{1,9}(/[0-9]{1,9})?\)")
Entries = tuple[tuple[str, str], ...]
GROUPS = ("parameters", "batch", "ops")


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisPlacements:
    """Placements along one mesh axis; the first entry whose pattern fits a name counts."""

    axis: str
    parameters: Entries = ()
    """(pattern of parameter names, `R` or `S(dim)` or `S(dim/outer)`)."""
    batch: Entries = ()
    """(pattern of the batch's tensors, `batch.0` and so on, placement)."""
    ops: Entries = ()
    """(key of an op, `inputs -> outputs`), placements separated by blanks."""

    def __post_init__(self) -> None:
        for group in GROUPS:
            for pattern, text in getattr(self, group):
                words = text.replace("->", " ").split() if group == "ops" else [text]
                wrong = [word for word in words if not _PLACEMENT.fullmatch(word)]
                if wrong or not words or (group == "ops") != ("->" in text):
                    raise PlanError(
                        f"placements.{self.axis}.{group}: {pattern}: {text} is not a placement.",
                        fix="write R, S(dim) or S(dim/outer)"
                        + (", inputs -> outputs, such as `R S(1) -> S(1)`." if group == "ops" else "."),
                    )

    def parameter(self, name: str) -> str | None:
        """What a parameter's entry says."""
        return _first(self.parameters, name)

    def batch_tensor(self, name: str) -> str | None:
        """What the entry of a tensor of the batch says."""
        return _first(self.batch, name)

    def to_plain(self) -> dict[str, dict[str, str]]:
        """As it stands in a file."""
        return {group: dict(getattr(self, group)) for group in GROUPS if getattr(self, group)}


def _first(entries: Entries, name: str) -> str | None:
    return next((text for pattern, text in entries if name == pattern or fnmatchcase(name, pattern)), None)


def placements_from(tables: Mapping[str, Mapping[str, Mapping[str, str]]]) -> tuple[AxisPlacements, ...]:
    """The `placements` of a plan file: axis -> group -> pattern -> placement."""
    return tuple(
        AxisPlacements(axis=axis, **{group: tuple(entries.items()) for group, entries in groups.items()})
        for axis, groups in tables.items()
    )
