"""How a job scales: the best plan on each of several numbers of devices, and how well they are used.

In: a subject, a cluster, numbers of devices. Out: rows of a table. By default the batch grows with the devices (as many
samples a device everywhere), so that efficiency is the rate over that many times the first row's rate a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.cluster.cluster import Cluster
from plait.errors import PlanError
from plait.search.choose import Request, part_of, ranking_of
from plait.search.oracle import SketchOracle
from plait.search.prediction import Prediction
from plait.search.subject import Subject


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
    subject: Subject, cluster: Cluster, counts: Sequence[int], request: Request, *, grow: bool = True
) -> list[Scaled]:
    """A row for every number of devices; with `grow`, the job's batch is that of one device."""
    if not counts or any(count < 1 for count in counts):
        raise PlanError(f"a table for {list(counts)} devices.", fix="write it like --scale 1,2,4,8.")
    largest = part_of(cluster, max(counts))
    if request.price_per_hour is not None:
        largest = replace(largest, price_per_hour=request.price_per_hour)
    limit = min(request.limit_bytes or largest.device.memory_bytes, largest.device.memory_bytes)
    known = SketchOracle(subject, largest, limit)
    rows: list[Scaled] = []
    base: float | None = None
    for count in counts:
        batch = subject.job.batch * (count if grow else 1)
        grown = replace(subject, job=replace(subject.job, batch=batch))
        oracle = known.on(part_of(largest, count), grown)
        try:
            best = ranking_of(oracle, request).predictions[0]
        except PlanError as error:
            rows.append(Scaled(ranks=count, prediction=None, efficiency=None, reason=error.what))
            continue
        each = best.samples_per_s / count
        base = each if base is None else base
        rows.append(Scaled(ranks=count, prediction=best, efficiency=each / base))
    return rows
