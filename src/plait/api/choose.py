"""Which plan, how fast, does it fit, and why.

In: a job or a model on paper, a cluster, what a person allows. Out: a `Choice`: the plans that fit, ranked, and those
that do not; a table of how it scales; the best plan as a file, for plait or for another system.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from plait.api.inputs.given import given_job, name_of
from plait.api.machine import cluster_here
from plait.cluster.cluster import Cluster
from plait.cluster.parse import THIS, parse_cluster
from plait.errors import PlanError, UsageError
from plait.files.write import write_named
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Changes, Search
from plait.plan.named import NAMED
from plait.plan.plan import Plan
from plait.run.prepare.fits import parse_memory
from plait.run.start.party import place_here
from plait.search.choose.choose import Request, oracle_for, part_of
from plait.search.choose.choose import choose as rank_plans
from plait.search.choose.explain import describe, explain
from plait.search.choose.rank import Ranking
from plait.search.choose.scaling import Scaled, scaling
from plait.search.choose.subject import Subject, subject_of_job, subject_of_paper
from plait.search.export import EXPORTERS, Setup
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was found for a job on a cluster."""

    subject: Subject
    """What was planned for."""
    ranking: Ranking
    """Plans that fit: the choice, then the fastest first; those that do not, with the reason; notices."""

    @property
    def best(self) -> Prediction:
        """Of the fastest plan; of those that predictions cannot tell apart, the simplest."""
        return self.ranking.predictions[0]

    @property
    def plan(self) -> Plan:
        """The plan of `best`; its micro-batches are `best.num_micro_batches`, the job's `accumulate`."""
        return self.best.plan

    @property
    def why(self) -> list[str]:
        """Why the first plan beats the second, a sentence each."""
        if len(self.ranking.predictions) < 2:
            return ["There is only one plan that fits."]
        return explain(*self.ranking.predictions[:2])

    def to_use(self, path: str | Path, job: str | None = None, cluster: str | None = None) -> str:
        """The command that uses the plan in a file on this machine: one that runs it only where it has the devices."""
        best, here = self.best, _devices_here(self.best.cluster)
        settings = f"--set batch={best.batch} --set accumulate={best.num_micro_batches}"
        if best.plan.ranks <= here and best.cluster.hosts == 1 and job is not None:
            return f"plait run {job} --plan {path} {settings}"
        needs = f"it needs {best.plan.ranks} devices of {best.cluster.name}, and this machine has {here}"
        if job is None:
            return f"for a job of this model, with {settings}; {needs}."
        return (
            f"plait predict {job} --plan {path} --cluster {cluster or best.cluster.name} {settings}; {needs} "
            "to run it on (--export writes it for other systems)."
        )

    def to_yaml(self) -> str:
        """The plan as a file that `plait run --plan` takes; the job's own part of it is a comment."""
        best = self.best
        lines = [
            f"# for {self.subject.name}, batch {best.batch}, on {best.cluster.name}",
            f"# predicted: {format_seconds(best.step_s)} a step, {best.utilization:.1%} of the peak, "
            f"{format_bytes(best.memory.total)} of {format_bytes(best.limit_bytes)} a device",
            f"# micro-batches belong to the job: run it with --set batch={best.batch} "
            f"--set accumulate={best.num_micro_batches}",
        ]
        return "\n".join(lines) + "\n" + best.plan.to_yaml()


@kept_generators()
def choose(
    job: Job | str | None = None,
    *,
    model: str | None = None,
    cluster: str | Cluster = "this",
    batch: int | None = None,
    changes: Changes = Changes(),
    search: Search = Search(),
) -> Choice:
    """Rank the plans for a job, or for a model on paper (`gpt3-175b`, `gpt:layers=24,...`), on a cluster."""
    _check(job, model, batch)
    request = _request(search)
    devices = _devices(cluster)
    subject = _subject_of(job, model, batch, changes)
    ranking = rank_plans(subject, devices, request)
    notices = (*ranking.notices, *_proposals(subject, devices))
    return Choice(subject=subject, ranking=replace(ranking, notices=notices))


@kept_generators()
def scale(
    counts: Sequence[int],
    job: Job | str | None = None,
    *,
    model: str | None = None,
    cluster: str | Cluster = "this",
    batch: int | None = None,
    changes: Changes = Changes(),
    same_batch: bool = False,
    search: Search = Search(),
) -> list[Scaled]:
    """The best plan on each of several numbers of devices; the batch grows with them unless it is the same for all."""
    _check(job, model, batch)
    request = replace(_request(search), top=1)
    devices = _devices(cluster)
    subject = _subject_of(job, model, batch, changes)
    oracle = oracle_for(subject, part_of(devices, max(counts, default=1)), request)
    return scaling(oracle, counts, request, grow=not same_batch)


def _devices(cluster: str | Cluster) -> Cluster:
    """What is planned for; `this` is the hosts of an engine where one has started this."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster == THIS and place_here() is not None:
        return cluster_here("cpu", lambda stage: None)
    return parse_cluster(cluster)


def _subject_of(
    job: Job | str | None,
    model: str | None,
    batch: int | None,
    changes: Changes,
) -> Subject:
    """What is planned for: a job, or a model on paper."""
    paper = subject_of_paper(model, batch) if model is not None else None
    named = paper.job if paper is not None else job
    assert named is not None
    if changes.mesh:
        raise UsageError("a mesh belongs to a plan, which is what is searched for.", fix="drop the mesh.")
    given, of_plan = given_job(named, changes)
    if of_plan:
        raise UsageError(
            f"--set {', '.join(of_plan)} belongs to a plan, which is what is searched for.",
            fix="set the job alone, or use plait predict.",
        )
    if paper is not None:
        return replace(paper, job=given)
    return subject_of_job(given if batch is None else replace(given, batch=batch), name_of(named))


def _check(job: Job | str | None, model: str | None, batch: int | None) -> None:
    """Refuse what can be refused without looking at anything."""
    if (job is None) == (model is None):
        raise UsageError(
            "plan takes a JOB or --model, and not both.",
            fix="plait plan path.py --cluster 8xA100, or plait plan --model gpt2 --cluster 8xA100.",
        )
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch} is no number of samples.", fix="use 1 or more.")


def export_plan(choice: Choice, to: str, out: str | Path | None = None) -> list[str]:
    """Write the best plan that another system can do as its configuration; what there is to say about it."""
    if to not in EXPORTERS:
        raise UsageError(f"--export {to!r} is not known.", fix=f"use one of {', '.join(EXPORTERS)}.")
    exporter, ranking = EXPORTERS[to], choice.ranking
    refused: str | None = None
    for number, found in enumerate(ranking.predictions, 1):
        setup = Setup(
            plan=found.plan,
            batch=found.batch,
            micro_batch=found.micro_batch,
            hosts=found.cluster.hosts,
            precision=choice.subject.job.precision,
            blocks=choice.subject.blocks,
            shape=choice.subject.shape,
        )
        reason = exporter.refusal(setup)
        if found.plan.memory.offload != "none" and to != "deepspeed":
            reason = reason or f"{to} has no place for memory.offload={', '.join(found.plan.memory.offload)}"
        if reason is not None:
            refused = refused or reason
            continue
        exported = exporter.write(setup)
        path = Path(out) if out is not None else Path(exporter.file_name)
        write_named(path, exported.text)
        lines = [f"wrote {path}: {describe(found.plan)} for {exporter.name}."]
        if refused is not None:
            slower = found.step_s / ranking.predictions[0].step_s - 1
            told = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
            lines.append(f"It is number {number} of the list, {told} than the first: {refused}.")
        return [*lines, *(f"note: {note}" for note in exported.notes)]
    raise PlanError(
        f"none of the {len(ranking.predictions)} best plans can be written for {exporter.name}: {refused}.",
        fix="raise --top, or name a plan that it has: --plan zero3, --plan 1f1b.",
    )


def _request(search: Search) -> Request:
    if search.plan is not None and search.plan not in NAMED:
        raise UsageError(f"there is no plan {search.plan!r}.", fix=f"choose one of {', '.join(NAMED)}.")
    return Request(
        ranks=search.ranks,
        limit_bytes=parse_memory(search.memory),
        top=max(search.top, 2),
        seconds=search.seconds,
        price_per_hour=search.price,
        named=search.plan,
    )


def _proposals(subject: Subject, cluster: Cluster) -> list[str]:
    """What would change numbers, and so is only proposed."""
    device = cluster.device
    gain = device.rate("bfloat16") / device.rate("float32")
    if subject.job.precision != "fp32" or gain < 2:
        return []
    return [
        f"the job computes in fp32; {device.name} is {gain:.0f} times faster in bf16. That changes numbers: set "
        "precision=bf16 in the job if you accept it."
    ]


def _devices_here(cluster: Cluster) -> int:
    """Devices of the cluster's kind that this machine has."""
    return (os.cpu_count() or 1) if cluster.device.name.startswith("cpu") else torch.cuda.device_count()
