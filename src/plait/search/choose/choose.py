"""Which plan: every candidate on a cluster, ranked.

In: a subject, a cluster, what a person allows. Out: a `Ranking`, of which the first is the choice: the simplest of
those that are as fast as predictions can tell. Within operators the placements of `resolve.py` count, between operators
the cuts of `between.py`; meshes, batches and memory are searched here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.cluster.cluster import Cluster
from plait.errors import PlanError
from plait.plan.plan import TENSOR
from plait.plan.single import single
from plait.search.choose.candidates import OFFLOAD_STATE, Candidate, Misfit, Space, candidates_on, meshes
from plait.search.choose.oracle import SketchOracle
from plait.search.choose.rank import PlanSearch, Ranking
from plait.search.choose.subject import Subject
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes

SKETCH_ERROR = 0.05
"""By how much predictions of plans are off beside each other, as published measurements have it (`docs/cost-model.md`):
a smaller gain is none, and the simpler plan comes first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a person asks for."""

    ranks: int | None = None
    """Devices to use; None: all."""
    limit_bytes: int | None = None
    """Memory of a device that may be used; None: all of it."""
    top: int = 10
    """Plans that are wanted."""
    seconds: float = 60.0
    """Time limit of the search."""
    price_per_hour: float | None = None
    """Of one device; None: as the cluster says."""
    named: str | None = None
    """The named plan that alone is wanted, where there are several ranks; None: all."""


def choose(subject: Subject, cluster: Cluster, request: Request) -> Ranking:
    """All plans for the subject on the cluster; raises `PlanError` where none can be used."""
    return ranking_of(oracle_for(subject, part_of(cluster, request.ranks), request), request)


def oracle_for(subject: Subject, cluster: Cluster, request: Request) -> SketchOracle:
    """The oracle of a subject on a cluster, with the memory and the price that were asked for."""
    if request.price_per_hour is not None:
        cluster = replace(cluster, price_per_hour=request.price_per_hour)
    limit = min(request.limit_bytes or cluster.device.memory_bytes, cluster.device.memory_bytes)
    return SketchOracle(subject, cluster, limit)


def ranking_of(oracle: SketchOracle, request: Request) -> Ranking:
    """All plans on the oracle's cluster."""
    deadline = time.perf_counter() + request.seconds
    subject, cluster = oracle.subject, oracle.cluster
    whole = oracle.sketcher(single(1)).costs
    space = Space(
        ranks=cluster.size,
        batch=subject.job.batch,
        devices_per_host=cluster.devices_per_host,
        num_units=whole.num_units,
        micro_batches=subject.micro_batches,
    )
    usable, misfits = meshes(space)
    search = PlanSearch(oracle, limit_bytes=oracle.limit_bytes, top=request.top, deadline=deadline)
    notices = list(subject.notices)
    candidates: list[Candidate] = []
    for mesh in usable:
        try:
            sequences = oracle.sequences(mesh.size_of(TENSOR))
        except PlanError as error:
            misfits.append(Misfit(mesh=mesh, reason=error.what))
            continue
        candidates += [
            candidate
            for candidate in candidates_on(mesh, space, sequences)
            if request.named in (None, candidate.plan.name) or mesh.size == 1
        ]
    search.add(candidates)
    if search.misses:  # what fits stays on the device
        search.add(candidate.with_offload(away) for candidate in candidates for away in OFFLOAD_STATE)
    found = search.ranking(misfits, notices)
    if not found.predictions:
        raise _nothing(found, oracle)
    ranked = list(map(oracle.with_cut, found.predictions[: request.top]))
    first = simplest(ranked, SKETCH_ERROR)
    predictions = (first, *(other for other in ranked if other is not first))
    return replace(found, predictions=predictions, relaxed=oracle.relaxed() if request.named is None else ())


def simplest(predictions: Sequence[Prediction], within: float = 0.02) -> Prediction:
    """Of the plans that are about as fast as the fastest, the one with the fewest parts."""
    least_s = min(found.step_s for found in predictions)
    near = [found for found in predictions if found.step_s <= least_s * (1 + within)]

    def parts(found: Prediction) -> tuple[int, ...]:
        plan = found.plan
        axes = sum(size > 1 for _, size in plan.mesh.axes)
        return (axes, plan.memory.zero, plan.memory.recompute != "none", plan.pipe.per_rank)

    return min(near, key=parts)


def part_of(cluster: Cluster, ranks: int | None) -> Cluster:
    """So many devices of a cluster, in as few hosts as can be."""
    if ranks is None or ranks == cluster.size:
        return cluster
    if not 1 <= ranks <= cluster.size:
        raise PlanError(
            f"{ranks} ranks were asked for; the cluster {cluster.name} has {cluster.size} devices.",
            fix=f"use 1 to {cluster.size} ranks, or describe a larger cluster.",
        )
    if ranks <= cluster.devices_per_host:
        return replace(cluster, hosts=1, devices_per_host=ranks)
    if ranks % cluster.devices_per_host:
        raise PlanError(
            f"{ranks} ranks do not fill hosts of {cluster.devices_per_host}.",
            fix=f"use a multiple of {cluster.devices_per_host}, or at most {cluster.devices_per_host}.",
        )
    return replace(cluster, hosts=ranks // cluster.devices_per_host)


def _nothing(found: Ranking, oracle: SketchOracle) -> PlanError:
    """Why no plan can be used, with the one that comes nearest."""
    memory = [entry for entry in found.rejected if entry.plan is not None]
    if not found.rejected:
        return PlanError(
            f"no plan of that name suits {oracle.cluster.size} devices.",
            fix="drop --plan, or use another number of ranks.",
        )
    if not memory:
        reasons = "; ".join(dict.fromkeys(entry.reason for entry in found.rejected))
        return PlanError(
            f"no plan runs {oracle.subject.name} on {oracle.cluster.size} devices: {reasons}.",
            fix="use a batch that the number of devices divides, or other ranks.",
        )
    least = min(memory, key=lambda entry: entry.needs_bytes)
    axes = " x ".join(f"{name}={size}" for name, size in least.mesh.axes)
    return PlanError(
        f"no plan fits: of {found.num_candidates} plans for {oracle.subject.name} on {oracle.cluster.size} devices, "
        f"the one that needs least memory ({axes}, zero={least.plan.memory.zero if least.plan else 0}) {least.reason}.",
        fix="use more devices, a smaller batch, or devices with more memory than "
        f"{format_bytes(oracle.limit_bytes)}.",
    )
