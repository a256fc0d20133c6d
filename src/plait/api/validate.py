"""How far predictions are from published measurements.

In: a file of cases, one JSON object a line. Out: every case with what was predicted, and sums by source. What cannot be
read or predicted is kept with its reason, never fatal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plait.search.published.case import BadLine, read_case_file
from plait.search.published.compare import SourceSummary, summarize
from plait.search.published.predictor import Outcome, predict_cases


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Predictions beside measurements."""

    outcomes: tuple[Outcome, ...]
    """Every case, with what was compared, or why it was skipped."""
    bad_lines: tuple[BadLine, ...]
    """What could not be read."""
    summaries: tuple[SourceSummary, ...]
    """Errors of every source."""


def validate(cases: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Validation:
    """Predict every case of a file; `progress` is told how many of how many are done."""
    found, bad = read_case_file(Path(cases))
    outcomes = predict_cases(found, progress if progress is not None else (lambda done, total: None))
    return Validation(outcomes=tuple(outcomes), bad_lines=tuple(bad), summaries=tuple(summarize(outcomes)))
