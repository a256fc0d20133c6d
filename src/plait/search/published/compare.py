"""How far predictions are from published measurements, source by source.

In: outcomes. Out: a `SourceSummary` for each source. Runs with a pipeline of the Hugging Face sweep are a group
of their own: many of them carry about a second of software overhead per micro-batch, which nothing here predicts.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from scipy.stats import spearmanr

from plait.search.published.case import Case
from plait.search.published.predictor import Compared, Outcome

_FEWEST = 4
"""Runs of one model that a rank correlation needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of one quantity."""

    count: int
    median: float
    """Of their absolute values."""
    mean: float
    """Of their absolute values."""
    bias: float
    """Their median, with its sign."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """One source."""

    source: str
    num_cases: int
    num_predicted: int
    skipped: Mapping[str, int]
    """Reason -> cases."""
    errors: Mapping[str, Errors]
    """By quantity: `step`, `memory`, `layer`, `bubble`, `bus`."""
    naive: Errors | None
    """Step time where every device does the group's median FLOP/s."""
    rank: float | None
    """Spearman's rank correlation of step times within a model, the mean over models; None: too few runs."""
    ranks: Mapping[str, float]
    """The same by model."""
    num_failed: int
    """Configurations that did not run."""
    num_failed_rejected: int
    """Of these, how many need more memory than there is, by prediction."""
    num_good: int
    """Configurations that ran."""
    num_good_rejected: int
    """Of these, how many the prediction rejects."""


def group_of(case: Case) -> str:
    """The source, and for the sweep whether it has a pipeline."""
    if "Hugging Face" not in case.source or case.kind not in ("training_run", "memory"):
        return case.source
    return f"{case.source} [pipe {'= 1' if case.plan.get('pipe', 1) == 1 else '> 1'}]"


def summarize(outcomes: Sequence[Outcome]) -> list[SourceSummary]:
    """Every source, in the order of the file."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(group_of(outcome.case), []).append(outcome)
    return [_summary(source, found) for source, found in groups.items()]


def _summary(source: str, outcomes: Sequence[Outcome]) -> SourceSummary:
    predicted = [outcome for outcome in outcomes if outcome.skipped is None]
    compared = [entry for outcome in predicted for entry in outcome.compared]
    runs = [outcome for outcome in predicted if outcome.flops_per_device is not None]
    good = [outcome for outcome in runs if not outcome.case.failed and outcome.case.kind in _RAN]
    failed = [outcome for outcome in runs if outcome.case.failed]
    ranks = _ranks(predicted)
    found = {what: [c.error for c in compared if c.what == what] for what in _QUANTITIES}
    return SourceSummary(
        source=source,
        num_cases=len(outcomes),
        num_predicted=len(predicted),
        skipped=dict(Counter(outcome.skipped for outcome in outcomes if outcome.skipped is not None)),
        errors={what: _errors(errors) for what, errors in found.items() if errors},
        naive=_naive(predicted),
        rank=fmean(ranks.values()) if ranks else None,
        ranks=ranks,
        num_failed=len(failed),
        num_failed_rejected=sum(outcome.rejected is not None for outcome in failed),
        num_good=len(good),
        num_good_rejected=sum(outcome.rejected is not None for outcome in good),
    )


_QUANTITIES = ("step", "memory", "layer", "bubble", "bus")
_RAN = ("training_run", "memory")


def _errors(errors: Sequence[float]) -> Errors:
    sizes = [abs(error) for error in errors]
    return Errors(count=len(errors), median=median(sizes), mean=fmean(sizes), bias=median(errors))


def _steps(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, Compared]]:
    pairs = ((outcome, outcome.of("step")) for outcome in outcomes)
    return [(outcome, step) for outcome, step in pairs if step is not None]


def _naive(outcomes: Sequence[Outcome]) -> Errors | None:
    """What one gets by dividing the model's FLOPs by a constant rate, at the group's own median."""
    work = [(outcome.flops_per_device or 0.0, step.measured) for outcome, step in _steps(outcomes)]
    if not work:
        return None
    rate = median(flops / seconds for flops, seconds in work)
    return _errors([flops / rate / seconds - 1 for flops, seconds in work])


def _ranks(outcomes: Sequence[Outcome]) -> dict[str, float]:
    by_model: dict[str, list[Compared]] = {}
    for outcome, step in _steps(outcomes):
        by_model.setdefault(_model_name(outcome.case), []).append(step)
    found = {}
    for name, steps in by_model.items():
        correlation = _correlation(steps, lambda step: step.measured, lambda step: step.predicted)
        if len(steps) >= _FEWEST and correlation is not None:
            found[name] = correlation
    return found


def _correlation(
    steps: Sequence[Compared], one: Callable[[Compared], float], other: Callable[[Compared], float]
) -> float | None:
    first, second = [one(step) for step in steps], [other(step) for step in steps]
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(spearmanr(first, second).statistic)


def _model_name(case: Case) -> str:
    model = case.model
    parts = [str(model.get("arch", "model")), str(model.get("size", ""))]
    parts += [f"{key}={model[key]}" for key in ("layers", "hidden") if model.get(key) is not None]
    return " ".join(part for part in parts if part)
