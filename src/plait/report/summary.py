"""The numbers that sum up a run.

In: a `RunRecord`. Out: a `Summary`; `report_json` gives it, with the breakdown, as plain JSON. It prints
nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from plait.report.breakdown import breakdown
from plait.report.graphs import graphs_of
from plait.report.record import RunRecord, read_run
from plait.report.traffic import traffic_of
from plait.units import format_seconds

_LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse", "nll")


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best value that a metric reached in evaluation."""

    metric: str
    """Its name."""
    value: float
    """The lowest of a loss or an error, the highest of anything else."""
    step: int | None
    """When."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run came to; `None` where its files do not say."""

    num_steps: int | None
    """Steps up to the last one that was logged; the first is step 0."""
    num_epochs: int | None
    """Passes over the data up to the last one that was logged, begun or done; the first is epoch 0."""
    first_loss: float | None
    """Training loss at the first logged step."""
    final_loss: float | None
    """Training loss at the last logged step."""
    samples_per_s: float | None
    """All samples over the time of their steps, the first of them left out where there are three."""
    peak_memory_bytes: int | None
    """The most memory that any line reports."""
    final_evaluation: Mapping[str, float]
    """The metrics of the last evaluation."""
    best: tuple[Best, ...]
    """The best of each evaluation metric."""


def summarize(record: RunRecord) -> Summary:
    """Sum up a run."""
    losses = [loss for _, loss in series(record.metrics, "loss")]
    memory = [value for _, value in series(record.metrics, "memory_bytes") if math.isfinite(value)]
    lines = (*record.metrics, *record.evaluations)
    steps = [step for line in lines if (step := number(line.get("step"))) is not None]
    epochs = [epoch for line in record.metrics if (epoch := number(line.get("epoch"))) is not None]
    return Summary(
        num_steps=int(max(steps)) + 1 if steps else None,
        num_epochs=int(max(epochs)) + 1 if epochs else None,
        first_loss=losses[0] if losses else None,
        final_loss=losses[-1] if losses else None,
        samples_per_s=_throughput(record.metrics),
        peak_memory_bytes=int(max(memory)) if memory else None,
        final_evaluation=_numbers(record.evaluations[-1]["evaluate"]) if record.evaluations else {},
        best=tuple(_best(record.evaluations)),
    )


def _throughput(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Samples of all steps over their time, but for the first, which warms up."""
    steps = []
    for line in lines:
        rate, step_s = number(line.get("samples_per_s")), number(line.get("step_s"))
        if rate is not None and step_s is not None and math.isfinite(rate) and math.isfinite(step_s):
            samples = number(line.get("samples"))
            steps.append((rate * step_s if samples is None else samples, step_s))
    steady = steps[1:] if len(steps) >= 3 else steps
    time_s = sum(step_s for _, step_s in steady)
    return sum(samples for samples, _ in steady) / time_s if time_s > 0 else None


def number(value: object) -> float | None:
    """A JSON number as a float, and nothing else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def series(lines: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """One quantity against the step, as people count it: from 1; from the lines that have it."""
    points = []
    for index, line in enumerate(lines):
        value = number(line.get(key))
        step = number(line.get("step", index))
        if value is not None and step is not None:
            points.append((step + 1, value))
    return points


def lower_is_better(metric: str) -> bool:
    """Whether a metric's name says that less is better."""
    return any(word in metric.lower() for word in _LOWER_IS_BETTER)


def compilation_of(record: RunRecord) -> tuple[str, str] | None:
    """(How long compilation took, of what); None where nothing was compiled."""
    found = record.totals.get("compiled")
    if found is None:
        return None
    rest = f" ({found.as_written} run as written)" if found.as_written else ""
    since = ""
    if found.first_step is not None:
        since = (
            f", in use from step {found.first_step + 1} on (steps waited {format_seconds(found.waited_s)})"
        )
    left = f", {found.waiting} not in use when the run ended" if found.waiting else ""
    return format_seconds(found.seconds), f"{found.segments} segments{rest}{since}{left}"


def report_json(run_dir: Path) -> dict[str, Any]:
    """The report of a run folder as plain values; numbers that are not finite become `null`."""
    record = read_run(run_dir)
    summary = summarize(record)
    report: dict[str, Any] = finite(
        {
            "folder": str(record.folder),
            "summary": {
                "num_steps": summary.num_steps,
                "num_epochs": summary.num_epochs,
                "first_loss": summary.first_loss,
                "final_loss": summary.final_loss,
                "samples_per_s": summary.samples_per_s,
                "peak_memory_bytes": summary.peak_memory_bytes,
                "final_evaluation": dict(summary.final_evaluation),
                "best": {best.metric: {"value": best.value, "step": best.step} for best in summary.best},
            },
            "evaluations": [
                {"step": line.get("step"), "epoch": line.get("epoch"), **_numbers(line["evaluate"])}
                for line in record.evaluations
            ],
            "breakdown": [one.as_dict() for one in breakdown(record.trace)] if record.trace else [],
            "traffic": traffic_of(record).as_dict(),
            "graphs": None if (graphs := graphs_of(record)) is None else asdict(graphs),
            "compiled": None
            if (compiled := record.totals.get("compiled")) is None
            else structs.asdict(compiled),
            "trace_source": record.trace.source if record.trace else None,
            "environment": dict(record.environment),
            "plan": record.plan,
            "notes": list(record.notes),
        }
    )
    return report


def finite(value: Any) -> Any:
    """The same value with `None` for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): one for name, value in values.items() if (one := number(value)) is not None}


def _best(evaluations: Sequence[Mapping[str, Any]]) -> Iterable[Best]:
    seen: dict[str, list[tuple[float, int | None]]] = {}
    for line in evaluations:
        step = number(line.get("step"))
        for metric, value in _numbers(line["evaluate"]).items():
            if math.isfinite(value):
                seen.setdefault(metric, []).append((value, None if step is None else int(step)))
    for metric, values in seen.items():
        choose = min if lower_is_better(metric) else max
        value, step_number = choose(values, key=lambda pair: pair[0])
        yield Best(metric=metric, value=value, step=step_number)
