"""How a job scales: the best plan on each of several numbers of devices, and how well they are used.

In: an oracle on the whole cluster, numbers of devices. Out: rows of a table. By default the batch grows with the
devices (as many samples a device everywhere), so that efficiency is the rate over that many times the first row's rate
a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.errors import PlanError
from plait.search.choose.choose import Request, part_of, ranking_of
from plait.search.choose.oracle import SketchOracle
from plait.search.predict.prediction import Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """The job on one number of devices."""

    ranks: int
    """Devices."""
    prediction: Prediction | None
    """Of the best plan; None where none can be used."""
    efficiency: float | None
    """Samples a second and device over those of the first row that fits."""
    reason: str | None = None
    """Why there is none."""


def scaling(
    oracle: SketchOracle, counts: Sequence[int], request: Request, *, grow: bool = True
) -> list[Scaled]:
    """A row for every number of the oracle's devices; with `grow`, the job's batch is that of one device."""
    if not counts or any(count < 1 for count in counts):
        raise PlanError(f"a table for {list(counts)} devices.", fix="write it like --scale 1,2,4,8.")
    rows: list[Scaled] = []
    base: float | None = None
    for count in counts:
        job = oracle.subject.job
        grown = replace(oracle.subject, job=replace(job, batch=job.batch * (count if grow else 1)))
        part = oracle.on(part_of(oracle.cluster, count), grown)
        try:
            best = ranking_of(part, request).predictions[0]
        except PlanError as error:
            rows.append(Scaled(ranks=count, prediction=None, efficiency=None, reason=error.what))
            continue
        each = best.samples_per_s / count
        base = each if base is None else base
        rows.append(Scaled(ranks=count, prediction=best, efficiency=each / base))
    return rows
