"""The choice that `plan="auto"` makes.

In: a job, the number of ranks, this machine or the hosts that an engine started. Out: the job with its micro-batches,
the plan, and what to tell. Sketches rank all plans; the first few that the compiler takes are compiled, their parts
timed here, and simulated, and the fastest of those is taken. What the compiler refuses is told. Nothing is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from plait.api.machine import remember, these_hosts, this_machine
from plait.cluster.cluster import Cluster
from plait.errors import CaptureError, PlanError
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.plan.named import NAMED, resolve
from plait.plan.plan import Plan, parse_plan
from plait.run.measure.hosts import led
from plait.run.measure.predict import predict_job
from plait.run.prepare.fits import parse_memory
from plait.run.start.party import place_here
from plait.run.start.tasks.first import First
from plait.search.choose.choose import Request, choose, simplest
from plait.search.choose.explain import describe
from plait.search.choose.subject import subject_of_job
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds

_EXACT = 3
"""Plans of the ranking that are compiled and timed, beside the simplest of the fast ones."""
_RANKED = 10
"""Plans of the ranking that are tried until so many compile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is run."""

    job: Job
    """With the number of micro-batches that the plan was chosen for."""
    plan: Plan
    told: str
    """The choice in a sentence, and what was refused."""


def choose_for_run(
    job: Job,
    name: str,
    ranks: int | None,
    device: str,
    tell: Callable[[str], None],
    memory: str | None = None,
) -> Chosen:
    """The plan for this machine, or for the hosts that an engine started, where the first task chooses for all; raises
    `PlanError` where none fits, or none compiles."""
    place = place_here()
    if place is None:
        return _choose(job, name, this_machine(device, tell), ranks, device, tell, memory)

    def lead(party: First) -> dict[str, Any]:
        cluster = these_hosts(party, device, tell)
        count = ranks if ranks is not None else cluster.size
        party.place.ranks_each(count)
        found = _choose(job, name, cluster, count, device, tell, memory)
        return {"plan": found.plan.to_yaml(), "accumulate": found.job.accumulate, "told": found.told}

    said = led(place, "plan auto", lead)
    return Chosen(
        job=replace(job, accumulate=said["accumulate"]),
        plan=parse_plan(said["plan"], NAMED),
        told=said["told"],
    )


def _choose(
    job: Job,
    name: str,
    cluster: Cluster,
    ranks: int | None,
    device: str,
    tell: Callable[[str], None],
    memory: str | None,
) -> Chosen:
    if ranks is not None and ranks > cluster.size:
        where = "this machine has" if cluster.hosts == 1 else "these hosts have"
        raise PlanError(
            f"--plan auto for {ranks} ranks; {where} {cluster.size} devices ({cluster.device.name}).",
            fix=f"use --ranks {cluster.size} or fewer, or name a plan.",
        )
    tell("ranking plans")
    limit = parse_memory(memory)
    try:
        subject = subject_of_job(job, name)
    except CaptureError as error:
        return _unseen(job, ranks if ranks is not None else min(cluster.size, job.batch), error)
    ranking = choose(subject, cluster, Request(ranks=ranks, limit_bytes=limit, top=_RANKED))
    captures = Captures(job)
    found: list[tuple[Prediction, Prediction]] = []
    refused: list[str] = []
    plain = simplest(ranking.predictions)
    for sketch in [plain, *(other for other in ranking.predictions if other is not plain)]:
        if len(found) == 1 + _EXACT:
            break
        try:
            exact = predict_job(
                replace(job, accumulate=sketch.num_micro_batches), sketch.plan, cluster,
                time_on=device, limit_bytes=limit, tell=tell, captures=captures,
            )  # fmt: skip
        except PlanError as error:
            refused.append(f"{describe(sketch.plan)}: {error.what}")
            continue
        cluster = exact.cluster
        if exact.prediction.reason is None:
            found.append((exact.prediction, sketch))
        else:
            refused.append(f"{describe(sketch.plan)}: {exact.prediction.reason}")
    remember(cluster)
    if not found:
        raise PlanError(
            f"none of the {len(refused)} plans that look best can be used: {'; '.join(refused)}.",
            fix="name a plan: --plan ddp.",
        )
    found.sort(key=lambda pair: pair[0].step_s)
    first = simplest([exact for exact, _ in found])
    sketch = next(sketch for exact, sketch in found if exact is first)
    return _chosen(job, first, sketch, len(found), refused)


def _unseen(job: Job, ranks: int, error: CaptureError) -> Chosen:
    """The plan for a model that runs as it is: one process, or copies of the whole model that share the batch."""
    plan = resolve("ddp" if ranks > 1 else "single", ranks)
    told = (
        f"plan auto: {describe(plan)}, without a prediction: the model cannot be captured, so that of the plans which "
        f"compute what one process does, only single and ddp can run it. {error.what}"
    )
    return Chosen(job=job, plan=plan, told=told)


def _chosen(job: Job, best: Prediction, sketch: Prediction, compiled: int, refused: list[str]) -> Chosen:
    count = sketch.num_micro_batches
    told = (
        f"plan auto: {describe(sketch.plan)}, {count} micro-batch{'es' if count > 1 else ''} a step; predicted "
        f"{format_seconds(best.step_s)} a step and {format_bytes(best.memory.total)} a rank "
        f"(best of {compiled} that were compiled and timed)."
    )
    if refused:
        told += f" Refused: {'; '.join(refused)}."
    return Chosen(job=replace(job, accumulate=count), plan=sketch.plan, told=told)
