"""The timelines of docs/pipelines.md: each schedule's step, drawn from a trace of plait's own simulator; and its table.

In: a name in `TIMELINES`. Out: SVG, one row a rank, one box an action with the number of its micro-batch. All boxes are
drawn to one scale, so that the length of a picture is the length of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from docs.pictures.svg import _text

from plait.program.simulate.schedule_clock import bubble_rate, durations, program_of_schedule
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Action, Costs, peak_in_flight
from plait.trace.span import Span, Trace

RANKS, MICRO_BATCHES = 4, 8
COSTS = Costs(forward=1.0, input=1.0, weight=1.0)
"""As in the zero-bubble paper's pictures: a backward takes twice as long as a forward, half of it for the weights."""
_UNIT, _ROW, _LEFT, _TOP = 16, 26, 64, 44
"""Points a unit of time and a row; where rows begin."""
_COLOURS = {"forward": "#7fb2e5", "backward": "#8fcf9f", "input": "#8fcf9f", "weight": "#f0c36d"}
_DARKER = {"forward": "#3f7fc0", "backward": "#4fa267", "input": "#4fa267", "weight": "#d09a2c"}
"""Of the second stage of a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One schedule."""

    title: str
    schedule: str
    stages_a_rank: int = 1
    drawn: int = MICRO_BATCHES
    """Micro-batches of the picture."""

    def actions(self, ranks: int = RANKS, micro_batches: int = MICRO_BATCHES) -> list[list[Action]]:
        """What the ranks do."""
        return SCHEDULES[self.schedule](ranks, self.stages_a_rank, micro_batches)

    def trace(self, ranks: int = RANKS, micro_batches: int = MICRO_BATCHES) -> Trace:
        """When they do it; a rank's stages together cost as much as the one stage of the others."""
        parts = self.stages_a_rank
        costs = Costs(forward=COSTS.forward / parts, input=COSTS.input / parts, weight=COSTS.weight / parts)
        program = program_of_schedule(self.schedule, self.actions(ranks, micro_batches))
        return simulate(program, durations(costs))


TIMELINES: Mapping[str, Timeline] = {
    "pipe_naive": Timeline(
        title="naive: one rank works at a time (3 micro-batches)", schedule="naive", drawn=3
    ),
    "pipe_gpipe": Timeline(title="gpipe: all forwards, then all backwards", schedule="gpipe"),
    "pipe_1f1b": Timeline(title="1f1b: backwards as soon as they can", schedule="1f1b"),
    "pipe_interleaved": Timeline(
        title="interleaved: two thin stages a rank", schedule="interleaved", stages_a_rank=2
    ),
    "pipe_zero-bubble": Timeline(
        title="zero-bubble: gradients of weights fill the gaps", schedule="zero-bubble"
    ),
    "pipe_zero-bubble-2": Timeline(
        title="zero-bubble-2: more micro-batches in flight, no gaps", schedule="zero-bubble-2"
    ),
}


def draw_timeline(timeline: Timeline) -> str:
    """The step as SVG."""
    spans = [
        span
        for span in timeline.trace(micro_batches=timeline.drawn).spans
        if span.kind in ("forward", "backward")
    ]
    end = max(span.end_s for span in spans)
    width, height = _LEFT + end * _UNIT + 16, _TOP + RANKS * _ROW + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        _text(12, 24, timeline.title, size=14, weight="bold"),
    ]
    for rank in range(RANKS):
        top = _TOP + rank * _ROW
        parts.append(_text(12, top + 17, f"rank {rank}", size=12))
        parts.append(
            f'<rect x="{_LEFT}" y="{top + 2}" width="{end * _UNIT:g}" height="{_ROW - 4}" fill="#eef0f2"/>'
        )
    for span in sorted(spans, key=lambda span: (span.rank, span.start_s)):
        parts += _box(span)
    x = float(_LEFT)
    foot = _TOP + RANKS * _ROW + 20
    kinds = dict.fromkeys(span.name.split()[0] for span in spans)
    texts = {
        "forward": "forward",
        "backward": "backward",
        "input": "backward: activations",
        "weight": "backward: weights",
    }
    for kind in kinds:
        parts.append(f'<rect x="{x:g}" y="{foot - 10}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(x + 18, foot, texts[kind], size=11))
        x += 30 + 6.5 * len(texts[kind])
    parts.append(f'<rect x="{x:g}" y="{foot - 10}" width="12" height="12" fill="#eef0f2"/>')
    parts.append(_text(x + 18, foot, "idle", size=11))
    return "\n".join([*parts, "</svg>\n"])


def _box(span: Span) -> list[str]:
    kind, stage = span.name.split()[0], span.stage
    assert stage is not None
    colour = _COLOURS[kind] if stage < RANKS else _DARKER[kind]
    left, top = _LEFT + span.start_s * _UNIT, _TOP + span.rank * _ROW + 2
    wide = span.duration_s * _UNIT
    return [
        f'<rect x="{left:g}" y="{top}" width="{wide:g}" height="{_ROW - 4}" fill="{colour}" stroke="#ffffff"/>',
        _text(left + wide / 2, top + 15, str(span.micro_batch), size=10 if wide > 10 else 7, anchor="middle"),
    ]


def table() -> str:
    """What each schedule costs, as Markdown: the length in units of one forward, idle time, activations kept."""
    lines = [
        "| schedule | length of a step | idle | idle, without both ends | micro-batches kept, by rank | idle with 32 |",
        "|---|---|---|---|---|---|",
    ]
    for timeline in TIMELINES.values():
        trace, longer = timeline.trace(), timeline.trace(micro_batches=32)
        parts = timeline.stages_a_rank
        kept = ", ".join(f"{most / parts:g}" for most in peak_in_flight(timeline.actions()))
        lines.append(
            f"| `{timeline.schedule}` | {_length(trace):g} | {_idle(trace):.1%} | {bubble_rate(trace):.1%} | {kept} |"
            f" {_idle(longer):.1%} |"
        )
    return "\n".join(lines)


def _length(trace: Trace) -> float:
    return max(span.end_s for span in trace.spans)


def _idle(trace: Trace) -> float:
    """The idle share of all ranks from the beginning of the step to its end."""
    busy = sum(span.duration_s for span in trace.spans if span.kind in ("forward", "backward"))
    return 1 - busy / (len(trace.ranks) * _length(trace))
