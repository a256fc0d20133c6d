"""Where the time of a step went, rank by rank.

In: a `Trace`. Out: one `RankBreakdown` per rank, whose parts add up to the step. It never looks at a clock or a
file.

The steps of a rank follow each other without a gap: a step starts where the one before it ended, so that time which
no span explains is idle time of some step. That needs no common clock. One or two steps have no such neighbours on
both sides: they start with the earliest rank and end with the latest, so that a pipeline's bubbles at both ends are
idle time too. Only the compute lane makes up the step; see `trace/span.py`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

from plait.trace.span import KINDS, Span, Sweep, Totals, Trace, union_s

PARTS: tuple[str, ...] = (
    "data_s",
    "forward_s",
    "backward_s",
    "exposed_communication_s",
    "update_s",
    "other_s",
    "idle_s",
)
"""The fields of `RankBreakdown` that add up to `step_s`."""

_PART_OF_KIND = {
    "data": "data_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "wait": "exposed_communication_s",
    "communication": "exposed_communication_s",
    "update": "update_s",
    "host": "other_s",
    "evaluate": "other_s",
    "checkpoint": "other_s",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBreakdown:
    """One rank's mean step; the seven parts of `PARTS` add up to `step_s`."""

    rank: int
    """The process."""
    num_steps: int
    """Steps that the means are over; the first step of a longer run is left out as warm-up."""
    step_s: float
    """From the end of one step to the end of the next."""
    data_s: float
    """The compute lane read or waited for data."""
    forward_s: float
    """The compute lane computed forward."""
    backward_s: float
    """The compute lane computed backward."""
    exposed_communication_s: float
    """The compute lane stood still until a communication was done."""
    update_s: float
    """The compute lane ran the optimizer."""
    other_s: float
    """The compute lane did something else: host work, evaluation, checkpoints."""
    idle_s: float
    """Nothing was on the compute lane."""
    hidden_communication_s: float
    """Communication under way while the compute lane went on; beside the step, not a part of it."""
    background_s: float
    """Work on the lanes `data` and `host`; beside the step, not a part of it."""
    communicated_bytes: int
    """Bytes communicated over all `num_steps` steps."""

    def share(self, part: str) -> float:
        """A part's fraction of the step."""
        return float(getattr(self, part)) / self.step_s if self.step_s > 0 else 0.0

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def breakdown(trace: Trace) -> list[RankBreakdown]:
    """The mean step of every rank that has spans, in order of rank.

    Where a rank did not keep every span, its sums over the whole run are used instead of the spans that are
    left.
    """
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        by_rank[span.rank].append(span)
    totals = {one.rank: one for one in trace.totals}
    line = [span for span in trace.spans if span.lane == "compute"] or list(trace.spans)
    first_s = min((span.start_s for span in line), default=0.0)
    last_s = max((span.end_s for span in line), default=0.0)
    result = []
    for rank in trace.ranks:
        if rank in totals and totals[rank].num_steps + 1 > len({span.step for span in by_rank[rank]}):
            result.append(_mean(totals[rank]))
        elif by_rank[rank]:
            result.append(_from_spans(rank, by_rank[rank], first_s, last_s))
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """One step of one rank."""

    step: int
    """Its number."""
    start_s: float
    """Where the step before it ended."""
    end_s: float
    """The end of its last span on the compute lane."""


def step_windows(spans: Sequence[Span], *, first_s: float, last_s: float) -> list[StepWindow]:
    """The steps of one rank, in order; `first_s` and `last_s` bound the trace over all ranks.

    Of a run that kept its first and its latest steps only, the first step after the hole starts with its own
    first span.
    """
    line = [span for span in spans if span.lane == "compute"] or list(spans)
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in line:
        starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
        ends[span.step] = max(span.end_s, ends.get(span.step, span.end_s))
    steps = sorted(starts)
    windows: list[StepWindow] = []
    for step in steps:
        if not windows:
            start_s = min(first_s, starts[step])
        elif step == windows[-1].step + 1:
            start_s = windows[-1].end_s
        else:
            start_s = max(starts[step], windows[-1].end_s)
        end_s = max(ends[step], start_s, last_s if step == steps[-1] and len(steps) < 3 else start_s)
        windows.append(StepWindow(step=step, start_s=start_s, end_s=end_s))
    return windows


def _from_spans(rank: int, spans: Sequence[Span], first_s: float, last_s: float) -> RankBreakdown:
    windows = step_windows(spans, first_s=first_s, last_s=last_s)
    if len(windows) >= 3:
        windows = windows[1:]
    counted = {window.step for window in windows}
    compute_s: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    line = sorted((span.start_s, span.end_s, span.kind) for span in spans if span.lane == "compute")
    beside = [(span.start_s, span.end_s) for span in spans if span.lane == "communication"]
    communication_s = 0.0
    for start_s, end_s in _merged(windows):
        sweep = Sweep(start_s)
        for begin, end, kind in line:
            compute_s[kind] += sweep.add(begin, min(end, end_s))
        communication_s += union_s(beside, after_s=start_s, before_s=end_s)
    chosen = [span for span in spans if span.step in counted]
    return _mean(
        Totals(
            rank=rank,
            num_steps=len(windows),
            wall_s=sum(window.end_s - window.start_s for window in windows),
            compute_s=compute_s,
            communication_s=communication_s,
            background_s=sum(span.duration_s for span in chosen if span.lane in ("data", "host")),
            num_bytes=sum(span.num_bytes for span in chosen if span.kind == "communication"),
        )
    )


def _merged(windows: Sequence[StepWindow]) -> list[tuple[float, float]]:
    """Neighbouring windows as one, so that a run is swept once and not once a step."""
    merged: list[tuple[float, float]] = []
    for window in windows:
        if merged and window.start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], window.end_s)
        else:
            merged.append((window.start_s, window.end_s))
    return merged


def _mean(totals: Totals) -> RankBreakdown:
    parts = dict.fromkeys(PARTS, 0.0)
    for kind, seconds in totals.compute_s.items():
        parts[_PART_OF_KIND[kind]] += seconds
    # A sum of many floats may pass the wall time by its rounding; idle time is never negative.
    parts["idle_s"] = max(0.0, totals.wall_s - sum(parts.values()))
    hidden_s = max(0.0, totals.communication_s - totals.compute_s.get("wait", 0.0))
    steps = totals.num_steps
    return RankBreakdown(
        rank=totals.rank,
        num_steps=steps,
        step_s=totals.wall_s / steps,
        hidden_communication_s=hidden_s / steps,
        background_s=totals.background_s / steps,
        communicated_bytes=totals.num_bytes,
        **{part: seconds / steps for part, seconds in parts.items()},
    )
