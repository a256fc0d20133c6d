"""`plait plan`: which plan, how fast, does it fit, and why.

In: what a person asked for on the command line. Out: tables or JSON, a plan file, the configuration of another system.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from plait.cli.options import job_with
from plait.cli.plan_view import (
    ranking_json,
    ranking_view,
    scaling_json,
    scaling_view,
)
from plait.cluster.cluster import Cluster
from plait.cluster.parse import parse_cluster
from plait.errors import PlanError, UsageError
from plait.job.reference import load_job
from plait.plan.named import NAMED
from plait.report.scaling_picture import scaling_picture
from plait.search.choose.choose import Request, choose, oracle_for, part_of
from plait.search.choose.explain import describe, explain
from plait.search.choose.rank import Ranking
from plait.search.choose.scaling import scaling
from plait.search.choose.subject import Subject, subject_of_job, subject_of_paper
from plait.search.export import EXPORTERS, Setup
from plait.search.predict.prediction import Prediction
from plait.units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning:
    """The options of `plait plan`."""

    job: str | None
    model: str | None
    cluster: str
    ranks: int | None
    memory: str | None
    batch: int | None
    price: float | None
    top: int
    seconds: float
    named: str | None
    explain: bool
    json: bool
    out: Path | None
    export: str | None
    scale: str | None
    same_batch: bool
    svg: Path | None
    job_settings: Mapping[str, Any]


def plan_command(asked: Planning, console: Console) -> int:
    """Do what the options say; 0."""
    request = _request(asked)
    counts = _counts(asked)
    exporter = None if asked.export is None else _exporter(asked.export)
    cluster = parse_cluster(asked.cluster)
    subject = _subject(asked)
    if counts is not None:
        return _scale(asked, subject, cluster, counts, request, console)
    ranking = choose(subject, cluster, request)
    ranking = replace(ranking, notices=(*ranking.notices, *_proposals(subject, cluster)))
    best = ranking.predictions[0]
    title = f"{subject.name}  batch {best.batch} on {best.cluster.name}"
    written = []
    if asked.out is not None and exporter is None:
        asked.out.write_text(plan_file(subject, best))
        written.append(f"wrote {asked.out}: {_how_to_run(asked, best)}")
    if exporter is not None:
        written += _export(asked, subject, ranking)
    if asked.json:
        said = ranking_json(ranking) | {"explained": _explained(ranking), "written": written}
        print(json.dumps(said))
        return 0
    console.print(ranking_view(title, ranking, best.limit_bytes))
    if asked.explain:
        console.print(Text("Why the first", "bold"))
        for line in _explained(ranking):
            console.print(Text(line), soft_wrap=True)
    for line in written:
        console.print(Text(line), soft_wrap=True)
    return 0


def plan_file(subject: Subject, best: Prediction) -> str:
    """The plan as a file that `plait run --plan` takes; the job's own part of it is a comment."""
    count = best.num_micro_batches
    lines = [
        f"# for {subject.name}, batch {best.batch}, on {best.cluster.name}",
        f"# predicted: {format_seconds(best.step_s)} a step, {best.utilization:.1%} of the peak, "
        f"{format_bytes(best.memory.total)} of {format_bytes(best.limit_bytes)} a device",
        f"# micro-batches belong to the job: run it with --set batch={best.batch} --set accumulate={count}",
    ]
    return "\n".join(lines) + "\n" + best.plan.to_yaml()


def _request(asked: Planning) -> Request:
    limit = None
    if asked.memory is not None:
        try:
            limit = parse_bytes(asked.memory)
        except ValueError as error:
            raise UsageError(f"--memory {asked.memory}: {error}.", fix="write it like 70GiB.") from error
    if asked.ranks is not None and asked.ranks < 1:
        raise UsageError(f"--ranks {asked.ranks} is no number of devices.", fix="use 1 or more.")
    if asked.batch is not None and asked.batch < 1:
        raise UsageError(f"--batch {asked.batch} is no number of samples.", fix="use 1 or more.")
    if asked.top < 1 or asked.seconds <= 0:
        raise UsageError(
            f"--top {asked.top} --seconds {asked.seconds:g} leaves nothing to show.", fix="use 1 or more."
        )
    if asked.price is not None and asked.price < 0:
        raise UsageError(
            f"--price {asked.price:g} is negative.", fix="give the price of one device and hour."
        )
    if asked.named is not None and asked.named not in NAMED:
        raise UsageError(f"there is no plan {asked.named!r}.", fix=f"choose one of {', '.join(NAMED)}.")
    return Request(
        ranks=asked.ranks,
        limit_bytes=limit,
        top=max(asked.top, 2),
        seconds=asked.seconds,
        price_per_hour=asked.price,
        named=asked.named,
    )


def _exporter(name: str) -> str:
    if name not in EXPORTERS:
        raise UsageError(f"--export {name!r} is not known.", fix=f"use one of {', '.join(EXPORTERS)}.")
    return name


def _counts(asked: Planning) -> list[int] | None:
    if asked.scale is None:
        return None
    try:
        return [int(word) for word in asked.scale.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--scale {asked.scale!r} is no list of numbers.", fix="write it like 1,2,4,8."
        ) from error


def _subject(asked: Planning) -> Subject:
    if (asked.job is None) == (asked.model is None):
        raise UsageError(
            "plan takes a JOB or --model, and not both.",
            fix="plait plan path.py --cluster 8xA100, or plait plan --model gpt2 --cluster 8xA100.",
        )
    if asked.model is not None:
        subject = subject_of_paper(asked.model, asked.batch)
        return replace(subject, job=job_with(subject.job, asked.job_settings))
    assert asked.job is not None
    job = job_with(load_job(asked.job), asked.job_settings)
    if asked.batch is not None:
        job = replace(job, batch=asked.batch)
    return subject_of_job(job, Path(asked.job.split(":")[0]).name)


def _proposals(subject: Subject, cluster: Cluster) -> list[str]:
    """What would change numbers, and so is only proposed."""
    device = cluster.device
    gain = device.rate("bfloat16") / device.rate("float32")
    if subject.job.precision == "bf16" or gain < 2:
        return []
    return [
        f"the job computes in fp32; {device.name} is {gain:.0f} times faster in bf16. That changes numbers: set "
        "precision=bf16 in the job if you accept it."
    ]


def _explained(ranking: Ranking) -> list[str]:
    if len(ranking.predictions) < 2:
        return ["There is only one plan that fits."]
    return explain(*ranking.predictions[:2])


def _how_to_run(asked: Planning, best: Prediction) -> str:
    job = asked.job or "JOB"
    settings = f"--set batch={best.batch} --set accumulate={best.num_micro_batches}"
    return f"plait run {job} --plan {asked.out} {settings}"


def _export(asked: Planning, subject: Subject, ranking: Ranking) -> list[str]:
    """Write the best plan that the other system can do."""
    exporter = EXPORTERS[str(asked.export)]
    refused: str | None = None
    for number, found in enumerate(ranking.predictions, 1):
        setup = Setup(
            plan=found.plan,
            batch=found.batch,
            micro_batch=found.micro_batch,
            hosts=found.cluster.hosts,
            precision=subject.job.precision,
            blocks=subject.blocks,
            shape=subject.shape,
        )
        reason = exporter.refusal(setup)
        if reason is not None:
            refused = refused or reason
            continue
        exported = exporter.write(setup)
        path = asked.out or Path(exporter.file_name)
        path.write_text(exported.text)
        lines = [f"wrote {path}: {describe(found.plan)} for {exporter.name}."]
        if refused is not None:
            slower = found.step_s / ranking.predictions[0].step_s - 1
            lines.append(f"It is number {number} of the list, {slower:.1%} slower than the first: {refused}.")
        return [*lines, *(f"note: {note}" for note in exported.notes)]
    raise PlanError(
        f"none of the {len(ranking.predictions)} best plans can be written for {exporter.name}: {refused}.",
        fix="raise --top, or name a plan that it has: --plan zero3, --plan 1f1b.",
    )


def _scale(
    asked: Planning, subject: Subject, cluster: Cluster, counts: list[int], request: Request, console: Console
) -> int:
    oracle = oracle_for(subject, part_of(cluster, max(counts)), request)
    rows = scaling(oracle, counts, replace(request, top=1), grow=not asked.same_batch)
    batch = "one batch" if asked.same_batch else "batch grows with devices"
    title = f"{subject.name} on {cluster.device.name}: {batch}"
    if asked.json:
        print(json.dumps(scaling_json(rows)))
    else:
        console.print(scaling_view(title, rows))
    if asked.svg is not None:
        points = [(row.ranks, row.prediction.samples_per_s) for row in rows if row.prediction is not None]
        if not points:
            raise PlanError(
                "no number of devices has a plan that fits.", fix="use more devices or less batch."
            )
        asked.svg.write_text(scaling_picture(title, points))
        if not asked.json:
            console.print(f"wrote {asked.svg}")
    return 0
