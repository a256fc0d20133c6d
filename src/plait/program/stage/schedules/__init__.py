"""In which order the ranks of a pipeline work: one small file per schedule."""

from collections.abc import Mapping
from types import MappingProxyType

from plait.program.stage.schedules.base import Schedule
from plait.program.stage.schedules.gpipe import gpipe
from plait.program.stage.schedules.interleaved import interleaved
from plait.program.stage.schedules.naive import naive
from plait.program.stage.schedules.one_f_one_b import one_f_one_b
from plait.program.stage.schedules.zero_bubble import zero_bubble_h1, zero_bubble_h2

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble_h1,
        "zero-bubble-2": zero_bubble_h2,
    }
)
"""By the name that plans use; each is synchronous: a step ends with all its gradients."""
