"""Fit the constants of a device type on published measurements, and see how they do on rows that were not fitted.

    python -m bench.calibrate CASES.jsonl A100 [--evaluations 300]

Half of the runs of every source, chosen by a hash of their ids, are fitted; sources with fewer than ten runs are fitted
whole. Runs with a pipeline of the Hugging Face sweep are left out, and so are those on more than 32 hosts of it (see
docs/cost-model.md). What is minimized is the absolute logarithm of predicted / measured, cut at 0.5, so that outliers
count little: for every source the mean of its median and its mean, over the bar that it should meet.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.optimize import minimize

from plait.cluster.calibration import Calibration
from plait.search.published.case import Case, read_cases
from plait.search.published.compare import group_of
from plait.search.published.network import CROWDED_HOSTS, is_efa
from plait.search.published.predictor import Predictor
from plait.search.published.setup import Setup, UnclearError, setup_of

FITTED = (
    "matmul_share", "matmul_tiles", "matmul_depth", "attention_share", "memory_share", "kernel_s", "host_s",
    "link_share", "step_s",
)  # fmt: skip
LIMITS: Mapping[str, tuple[float, float]] = {
    "matmul_share": (0.4, 1.0),
    "attention_share": (0.1, 1.0),
    "memory_share": (0.3, 1.0),
    "link_share": (0.3, 1.0),
    "kernel_s": (5e-7, 2e-5),
    "step_s": (1e-4, 3e-2),
}
"""Outside of these a constant would not mean what it is called."""
BARS = {"vTrain": 0.08, "mosaicml": 0.08, "Korthikanti": 0.04, "Narayanan": 0.06, "Hugging": 0.18}
"""Median error that a source should meet, by a word of its name."""
_CUT = 0.5
_SMALL = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A case that can be predicted, with what was measured."""

    case: Case
    setup: Setup
    step_s: float
    source: str


def runs_of(cases: Sequence[Case], device: str) -> list[Run]:
    """Training runs on a type of device from sources that have a bar."""
    found = []
    for case in cases:
        if (
            case.kind != "training_run"
            or case.step_s is None
            or device not in str(case.cluster.get("gpu")).upper()
        ):
            continue
        source = next((name for name in BARS if name in case.source), None)
        try:
            setup = setup_of(case)
        except UnclearError:
            continue
        apart = "> 1]" in group_of(case) or (is_efa(case) and setup.cluster.hosts > CROWDED_HOSTS)
        if source is not None and not apart:
            found.append(Run(case=case, setup=setup, step_s=case.step_s, source=source))
    return found


def errors(predictor: Predictor, runs: Sequence[Run], constants: Calibration) -> dict[str, list[float]]:
    """By source: the absolute logarithms of predicted / measured."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        device = replace(run.setup.cluster.device, calibration=constants)
        setup = replace(run.setup, cluster=replace(run.setup.cluster, device=device))
        predicted = predictor.predict(run.case, setup).step_s
        found[run.source].append(abs(math.log(predicted / run.step_s)))
    return found


def loss(found: Mapping[str, Sequence[float]]) -> float:
    """What is minimized; a source above 80 % of its bar counts more."""
    total = 0.0
    for source, values in found.items():
        cut = [min(value, _CUT) for value in values]
        bar = BARS[source]
        total += (0.6 * median(cut) + 0.4 * fmean(cut)) / bar + 3 * max(0.0, median(cut) / bar - 0.8)
    return total


def bounded(logarithms: Sequence[float], start: Calibration) -> tuple[Calibration, float]:
    """Constants within their limits, and a penalty for what was cut off."""
    values, penalty = {}, 0.0
    for name, logarithm in zip(FITTED, logarithms, strict=True):
        low, high = LIMITS.get(name, (0.0, math.inf))
        value = math.exp(logarithm)
        values[name] = min(max(value, low), high)
        penalty += abs(math.log(value / values[name]))
    return replace(start, **values), penalty


def fit(predictor: Predictor, runs: Sequence[Run], start: Calibration, evaluations: int) -> Calibration:
    """Nelder and Mead's simplex in the logarithms of the constants."""
    first = np.log([getattr(start, name) for name in FITTED])

    def value(logarithms: Sequence[float]) -> float:
        constants, penalty = bounded(logarithms, start)
        return loss(errors(predictor, runs, constants)) + penalty

    simplex = np.vstack([first, first + 0.2 * np.eye(len(FITTED))])
    options = {"maxfev": evaluations, "adaptive": True, "initial_simplex": simplex}
    found = minimize(value, first, method="Nelder-Mead", options=options)
    return bounded(list(found.x), start)[0]


def is_fitted(run: Run, count: int) -> bool:
    """Whether a run is in the half that is fitted."""
    return count < _SMALL or sha256(run.case.id.encode()).digest()[0] % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", type=Path)
    parser.add_argument("device", help="A100, H100, ...")
    parser.add_argument("--evaluations", type=int, default=300)
    given = parser.parse_args()
    cases, _ = read_cases(given.cases.read_text().splitlines())
    runs = runs_of(cases, given.device.upper())
    if not runs:
        sys.exit(f"no runs on {given.device} in {given.cases}")
    counts = {name: sum(run.source == name for run in runs) for name in BARS}
    fitted = [run for run in runs if is_fitted(run, counts[run.source])]
    held_out = [run for run in runs if run not in fitted]
    predictor = Predictor()
    start = runs[0].setup.cluster.device.calibration
    print(f"{len(fitted)} runs are fitted, {len(held_out)} are not; costs are read first", flush=True)
    constants = fit(predictor, fitted, start, given.evaluations) if given.evaluations else start
    for name in FITTED:
        print(f"    {name}={getattr(constants, name):.4g},")
    for title, part in (("fitted", fitted), ("held out", held_out)):
        for source, values in errors(predictor, part, constants).items():
            print(
                f"{title:9} {source:12} {len(values):4} runs, median error {math.expm1(median(values)):.1%}"
            )


if __name__ == "__main__":
    main()
