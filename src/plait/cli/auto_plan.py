"""The choice that `plait run --plan auto` makes.

In: a job, the number of ranks, this machine. Out: the job with its micro-batches, the plan, and what to tell. Sketches
rank all plans; the first few are then compiled, their parts timed here, and simulated, and the fastest of those is
taken. Nothing is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from plait.cli.predict_command import remember, this_machine
from plait.errors import CaptureError, PlaitError, PlanError, UsageError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.plan import Plan
from plait.run.measure.predict import predict_job
from plait.search.choose.choose import Request, choose, simplest
from plait.search.choose.explain import describe
from plait.search.choose.subject import subject_of_job
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds

_EXACT = 3
"""Plans of the ranking that are compiled and timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is run."""

    job: Job
    """With the number of micro-batches that the plan was chosen for."""
    plan: Plan
    told: str
    """The choice in a sentence."""


def choose_for_run(
    job: Job, name: str, ranks: int | None, mesh: str | None, device: str, tell: Callable[[str], None]
) -> Chosen:
    """The plan for this machine; raises `PlanError` where none fits."""
    if mesh is not None:
        raise UsageError(f"--plan auto chooses the mesh; --mesh {mesh} says it.", fix="drop one of the two.")
    cluster = this_machine(device, tell)
    if ranks is not None and ranks > cluster.size:
        raise PlanError(
            f"--plan auto for {ranks} ranks; this machine has {cluster.size} devices ({cluster.device.name}).",
            fix=f"use --ranks {cluster.size} or fewer, or name a plan.",
        )
    tell("ranking plans")
    ranking = choose(subject_of_job(job, name), cluster, Request(ranks=ranks))
    captures = Captures(job)
    found: list[tuple[Prediction, Prediction]] = []
    tried = [*ranking.predictions[:_EXACT]]
    plain = simplest(ranking.predictions)
    for sketch in tried if plain in tried else [*tried, plain]:
        try:
            exact = predict_job(
                replace(job, accumulate=sketch.num_micro_batches), sketch.plan, cluster,
                time_on=device, tell=tell, captures=captures,
            )  # fmt: skip
        except CaptureError:
            raise
        except PlaitError:  # a plan that the compiler refuses is no choice
            continue
        cluster = exact.cluster
        if exact.exact.prediction.fits:
            found.append((exact.exact.prediction, sketch))
    remember(cluster)
    if not found:
        best = ranking.predictions[0]
        return _chosen(job, best, best, "by sketch alone")
    found.sort(key=lambda pair: pair[0].step_s)
    first = simplest([exact for exact, _ in found])
    sketch = next(sketch for exact, sketch in found if exact is first)
    return _chosen(job, first, sketch, f"best of {len(found)} that were compiled and timed")


def _chosen(job: Job, best: Prediction, sketch: Prediction, how: str) -> Chosen:
    count = sketch.num_micro_batches
    told = (
        f"plan auto: {describe(sketch.plan)}, {count} micro-batch{'es' if count > 1 else ''} a step; predicted "
        f"{format_seconds(best.step_s)} a step and {format_bytes(best.memory.total)} a rank ({how})."
    )
    return Chosen(job=replace(job, accumulate=count), plan=sketch.plan, told=told)
