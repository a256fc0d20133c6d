"""Why one plan is faster than another, in sentences with numbers.

In: two predictions of one batch. Out: lines of text. It compares what the predictions say and adds nothing.
"""

from dataclasses import dataclass

from plait.plan.plan import PIPE, Plan
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSplit:
    """Where the time of a step goes."""

    works_s: float
    """Computing, and what a step always costs."""
    waits_s: float
    """Waiting for other stages."""
    exposed_s: float
    """Communication in which nothing is computed."""


def time_split(prediction: Prediction) -> TimeSplit:
    """The parts of a predicted step."""
    waits_s = prediction.bubble * prediction.step_s
    works_s = max(0.0, prediction.step_s - waits_s - prediction.exposed_s)
    return TimeSplit(works_s=works_s, waits_s=waits_s, exposed_s=prediction.exposed_s)


def describe(plan: Plan) -> str:
    """A plan in a few words: `pipe=8 x data=16 x tensor=8, zero1, 1f1b`."""
    words = [" x ".join(f"{name}={size}" for name, size in plan.mesh.axes)]
    if plan.memory.zero:
        words.append(f"zero{plan.memory.zero}")
    if plan.mesh.size_of(PIPE) > 1:
        chunks = f" of {plan.pipe.per_rank} stages a rank" if plan.pipe.per_rank > 1 else ""
        words.append(f"{plan.pipe.schedule}{chunks}")
    if plan.tensor.sequence:
        words.append("sequence cut")
    if plan.memory.recompute != "none":
        words.append(f"recompute {plan.memory.recompute}")
    if plan.memory.offload != "none":
        words.append(f"{', '.join(plan.memory.offload)} on the host")
    return ", ".join(words)


def explain(first: Prediction, second: Prediction) -> list[str]:
    """Why the first is faster than the second, or as fast and simpler."""
    gain = second.step_s / first.step_s - 1
    lines = [
        f"first:  {describe(first.plan)}, micro-batch {first.micro_batch}: {format_seconds(first.step_s)} a step",
        f"second: {describe(second.plan)}, micro-batch {second.micro_batch}: {format_seconds(second.step_s)} a step",
        f"The second takes {gain:.1%} longer."
        if gain >= 0
        else f"The second takes {-gain:.1%} less, less than predictions can tell: the first has fewer parts.",
    ]
    ours, theirs = time_split(first), time_split(second)
    compared = [
        ("computes", ours.works_s, theirs.works_s),
        ("waits for other stages", ours.waits_s, theirs.waits_s),
        ("waits for communication", ours.exposed_s, theirs.exposed_s),
    ]
    for what, mine, other in sorted(compared, key=lambda entry: entry[1] - entry[2]):
        if mine == other == 0:
            continue
        change = (
            f"{format_seconds(abs(mine - other))} {'less' if mine <= other else 'more'} than the second's"
        )
        lines.append(f"  {what} {format_seconds(mine)} of a step: {change} {format_seconds(other)}")
    axes = dict.fromkeys([*first.sent_bytes, *second.sent_bytes])
    for axis in axes:
        sent = [format_bytes(p.sent_bytes.get(axis, 0.0)) for p in (first, second)]
        lines.append(f"  sends {sent[0]} a device and step along {axis}; the second {sent[1]}")
    limit = format_bytes(first.limit_bytes)
    needs = [format_bytes(p.memory.total) for p in (first, second)]
    lines.append(f"  needs {needs[0]} of {limit}; the second {needs[1]}")
    return lines
