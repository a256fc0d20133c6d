"""WHAT HAPPENED: the spans of a run, measured or simulated, and their files.

In: what a worker or the simulator saw of each instruction. Out: a `Trace`, and the files of `<run>/trace/`.
This folder never runs an instruction and never draws: `report/` does.
"""

from plait.trace.files import read_trace, write_chrome, write_trace
from plait.trace.recorder import Recorder, clock_offset_ns
from plait.trace.span import KINDS, LANES, Lane, Source, Span, SpanKind, Totals, Trace

__all__ = [
    "KINDS",
    "LANES",
    "Lane",
    "Recorder",
    "Source",
    "Span",
    "SpanKind",
    "Totals",
    "Trace",
    "clock_offset_ns",
    "read_trace",
    "write_chrome",
    "write_trace",
]
