"""Train a job: from Python, from a notebook, from the command line. Everything that can go wrong beforehand
does so here.

In: a job, a plan. Out: a `Result`, and a run folder. The model is captured and the program compiled before
any process starts; workers inherit both.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plait.callbacks import Callbacks, Watching
from plait.errors import CaptureError, JobError
from plait.files.write import write_or_tell, write_whole
from plait.graph.from_job import Captures
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Changes, Limits, Listener, Saving, Trial
from plait.plan.named import NAMED, resolve
from plait.plan.plan import Plan, parse_plan
from plait.rewrite.choose import settled_for
from plait.run.join.find import task_of
from plait.run.link.host_links import HostMesh
from plait.run.loop.shared_model import check_shared
from plait.run.loop.task import Task
from plait.run.parent.again import Again, check_bad_loss
from plait.run.parent.attempts import Attempts
from plait.run.parent.found import find_run
from plait.run.parent.outlive import SAVE_EVERY, Outlive, hand_on, plan_for_those_here, plan_on
from plait.run.parent.ranks import Main, start_of, threads_per_rank
from plait.run.parent.resume import Continued, continued_from, last_of, located
from plait.run.prepare.about import about
from plait.run.prepare.fits import memory_limit
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.prepare.room import check_room
from plait.run.prepare.rules import check_emulation, check_slow
from plait.run.proof.first_step import check_capture
from plait.run.record.evaluate import check_keep_best
from plait.run.record.folder import discard_if_empty, make_run_folder, write_environment, write_totals
from plait.run.record.last_words import room_for_last_words
from plait.run.record.ledger import write_left_shares
from plait.run.record.lock import locked
from plait.run.record.result import Result
from plait.run.setup.device import check_device, check_suits_device
from plait.run.start.guardian import Guardian
from plait.run.start.party import facts_of, join, place_here, ranks_wanted, telling
from plait.run.start.processes import Start
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower, Round
from plait.run.start.watch.interrupts import raised_in_safety
from plait.trace.files import read_trace, write_chrome
from plait.trace.recorder import clock_offset_ns

_BEGIN_S = 600.0
"""For other tasks to come to where this one is: they have met before, and do the same."""


@raised_in_safety()
@kept_generators()
def train(
    job: Job,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes = Changes(),
    steps: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    resume: str | Path | None = None,
    saving: Saving = Saving(),
    limits: Limits = Limits(),
    trial: Trial = Trial(),
    watching: Watching = Watching(),
    captures: Captures | None = None,
) -> Result:
    """Train `job` and return its result: `plait run`, with the same names; `captures`: graphs that are known.

    Of `changes` those of the plan are made here; what is changed of the job has been.
    """
    _check_is_job(job)
    place = place_here()
    chosen = resolve(plan, ranks_wanted(place, plan, ranks, changes.mesh), changes.settings, changes.mesh)
    started = task_of(os.environ) if limits.elastic is not None else None
    if started is not None and started.room not in (None, chosen.ranks):
        chosen = plan_on(chosen, started.room)
    chosen = settled_for(1 if place is None else place.tasks, chosen)
    if steps is not None:
        job = replace(job, steps=steps, epochs=None)
    party = join(place, chosen.ranks, outlives=limits.elastic is not None) if place is not None else None
    tell = Callbacks(watching.callbacks, watching.listener or (lambda event: None))
    begins_again = _find(resume, None if started is None else out, party, tell, limits)
    check_device(device)
    check_suits_device(chosen, device)
    check_slow(trial.slow, chosen, device)
    check_emulation(trial.emulation, chosen, device, is_alone=place is None)
    dtype = torch.float64 if trial.dtype == "float64" else torch.float32
    check_shared(chosen, device, None if place is None else place.engine)
    check_keep_best(saving.keep_best, job, chosen)
    check_bad_loss(limits.on_bad_loss, chosen)
    options = _Options(
        device=device, dtype=dtype, resume=resume, begins_again=begins_again,
        saving=saving, limits=limits, trial=trial,
        facts=facts_of(job, chosen, device=device, dtype=trial.dtype, **_of_file(saving)), captures=captures,
    )  # fmt: skip
    if isinstance(party, Follower):
        return _follow(party, job, chosen, options)
    with telling(party):
        if party is not None:
            party.begin(options.facts, patience_s=_BEGIN_S)
        resumes = resume is not None or begins_again
        folder = make_run_folder(Path(out) if out else None, saving.name, resuming=resumes)
        result, summary = _lead(job, chosen, folder, options, tell, party)
        if party is not None:
            kept = {name: summary[name] for name in ("losses", "evaluation", "stopped")}
            party.end(kept | {"folder": str(folder.absolute())})
        return result


def _check_is_job(job: object) -> None:
    if not isinstance(job, Job):
        raise JobError(
            f"train takes a plait.Job, not {type(job).__name__}.",
            fix="call your job function first: train(job()).",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """What was asked for, as all tasks of a run know it."""

    device: str
    dtype: torch.dtype
    resume: str | Path | None
    begins_again: bool
    """Whether an engine has started again what is in the run folder."""
    saving: Saving
    limits: Limits
    trial: Trial
    facts: Mapping[str, Any]
    """What must be the same on all tasks."""
    captures: Captures | None
    """Graphs of the job that are known already."""


def _find(
    resume: str | Path | None,
    out: str | Path | None,
    party: First | Follower | None,
    tell: Callbacks,
    limits: Limits,
) -> bool:
    """Have what any host has of a run that is to go on at task 0; whether it is one that an engine has started again,
    in the folder `out` that it had."""
    folder = resume if resume is not None else out
    if folder is None or (resume is not None and party is None):
        return False
    if party is not None and str(folder) in party.found:
        told = party.found.pop(str(folder))
    else:
        with telling(party):
            told = find_run(Path(folder), party, tell, is_kept=limits.elastic is not None)
    return told is not None and resume is None


def _of_file(saving: Saving) -> dict[str, Any]:
    """What is known of the file that the job came from."""
    known = saving.remembered.get("job_sha256")
    return {} if known is None else {"job file (by its SHA-256)": str(known)[:12]}


def _lead(
    job: Job, chosen: Plan, folder: Path, options: _Options, tell: Callbacks, party: First | None
) -> tuple[Result, dict[str, Any]]:
    """Train, as the only task or the first, which has the run folder."""
    device, saving, limits = options.device, options.saving, options.limits

    def say(text: str) -> None:
        tell({"notice": text})

    with locked(folder), room_for_last_words(folder), Guardian() as guardian:
        try:
            checkpoint = last_of(folder, tell) if options.begins_again else located(options.resume, tell)
            continued = continued_from(checkpoint, job) if checkpoint else Continued()
            start_step = continued.step
            wanted, chosen = chosen, plan_for_those_here(chosen, party, limits.elastic_ranks)
            programs = _prepared(job, chosen, folder, options, tell, party, start_step)
        except BaseException:
            discard_if_empty(folder)
            raise
        chosen, job = programs.plan, programs.whole
        num_samples = programs.captures.source.num_samples
        for change in continued.changes(job, chosen, num_samples):
            say(f"resume: {change}")
        outlive = _outlive(options, chosen if wanted.ranks == chosen.ranks else wanted, tell)
        task = _task(
            job, chosen, folder, options, resume=checkpoint, clock_offset_ns=clock_offset_ns(), num_samples=num_samples,
            tell_every_step=tell.wants_steps,
            attempt=int(options.begins_again or chosen.ranks != wanted.ranks),
        )  # fmt: skip
        if outlive is not None and options.begins_again:
            outlive.begun_again(task, start_step)
            outlive.write(folder)
        order = job.order(num_samples)
        write_left_shares(folder, start_step, samples=saving.record_samples, order=order, tell=say)
        write_whole(folder / "plan.yaml", chosen.to_yaml())
        known = {"ranks": chosen.ranks, "device": device, "batch": job.batch, "seed": job.seed}
        hosts = {"hosts": party.hosts()} if party is not None else {}
        write_environment(folder, {**known, **hosts, **saving.remembered}, start_step=start_step)
        total_steps = job.total_steps(num_samples)
        if total_steps is not None and total_steps <= start_step:
            say(f"step {start_step} of {total_steps} was reached before: nothing is left to train.")
        tell({"started": str(folder), "total_steps": total_steps, "start_step": start_step})
        attempts = Attempts(
            again=Again(on_bad_loss=limits.on_bad_loss, tell=tell), outlive=outlive, guardian=guardian, party=party,
            wants_end=lambda: tell.stop,
        )  # fmt: skip
        try:
            summary, programs = attempts.run(task, programs, start_step)
        except BaseException as error:
            tell.fail(error)
            raise
        write_or_tell(lambda: write_totals(folder, programs.plan, summary), say)
        if options.saving.trace and summary["losses"]:
            write_or_tell(lambda: _write_timeline(folder), say)
        tell.end(summary["stopped"])
        notices = (*programs.choices, *summary["notices"])
        return Result.of(summary, folder, notices, job), summary


def _prepared(
    job: Job,
    chosen: Plan,
    folder: Path,
    options: _Options,
    tell: Callbacks,
    party: First | None,
    start_step: int,
) -> Programs:
    """The programs of a run that can begin: captured, checked against the user's own code, with room on the disk."""
    device, dtype, limits = options.device, options.dtype, options.limits
    said: list[dict[str, Any]] = []
    limit = memory_limit(device, limits.memory)
    programs = prepare(job, chosen, device, dtype, said.append, options.captures, limit)
    for event in ({"run": about(programs, folder, device, start_step)}, *said):
        tell(event)
    if party is not None:
        tell({"notice": _where(party, programs.plan)})
    comparing = options.trial.record_gradients or dtype != torch.float32
    if limits.check and not comparing:
        try:
            lines = [check_capture(part.job, part) for part in programs.parts]
        except CaptureError:
            captures = Captures(programs.job, programs.captures.source, dtype, programs.device.type)
            captures.questions.asked = programs.captures.questions.asked
            if party is not None or len(programs.parts) > 1 or not captures.questions.hide():
                raise
            programs = prepare(job, chosen, device, dtype, said.append, captures, limit)
            lines = [captures.questions.line(), check_capture(programs.job, programs)]
        for line in dict.fromkeys(line for line in lines if line is not None):
            tell({"notice": line})
    saves = options.saving.checkpoint_every is not None or programs.plan.sync.servers > 0
    check_room(folder, programs, on_the_way=saves)
    return programs


def _where(party: First, plan: Plan) -> str:
    """How the mesh lies on hosts, and where its files are."""
    place, seats = party.place, party.members.seats(plan.ranks)
    per_host = place.local_tasks * len(seats[0])
    cut = HostMesh.of(plan.mesh, per_host) if 1 < per_host < plan.mesh.size else None
    lies = cut.describe() if cut is not None else " x ".join(f"{n}={size}" for n, size in plan.mesh.axes)
    return (
        f"{sum(map(bool, seats.values()))} tasks of {place.engine}, {plan.ranks} ranks: {lies}. Files are at task 0 on "
        f"{party.hosts()[0]['host']}: without that host the run ends, and goes on where it is resumed."
    )


def _task(job: Job, plan: Plan, folder: Path, options: _Options, **more: Any) -> Task:
    """What every rank is told."""
    saving, limits, trial = options.saving, options.limits, options.trial
    return Task(
        job=job, plan=plan, folder=folder, device=options.device, dtype=options.dtype,
        limit_bytes=memory_limit(options.device, limits.memory),
        checkpoint_every=saving.checkpoint_every or (None if limits.elastic is None else SAVE_EVERY),
        checkpoint_timeout_s=saving.checkpoint_timeout_s,
        keep=saving.keep, keep_best=saving.keep_best,
        record_samples=saving.record_samples, record_gradients=trial.record_gradients, trace=saving.trace,
        hang_s=limits.hang_s, compare_every=limits.compare_every, spike=limits.spike, detect_nan=limits.detect_nan,
        slow=dict(trial.slow), emulation=trial.emulation, outlives=limits.elastic is not None, **more,
    )  # fmt: skip


def _outlive(options: _Options, plan: Plan, tell: Listener) -> Outlive | None:
    """What is done about lost ranks; None: nothing."""
    ranks = options.limits.elastic_ranks
    if ranks is None:
        return None
    limit = memory_limit(options.device, options.limits.memory)
    return Outlive(least=ranks[0], most=ranks[1], tell=tell, limit_bytes=limit, wanted=plan)


def _follow(party: Follower, job: Job, chosen: Plan, options: _Options) -> Result:
    """Train as a task that is not the first: its ranks are started when task 0 says so."""
    party.begin(options.facts)
    with Guardian() as guardian:
        try:
            limit = memory_limit(options.device, options.limits.memory)
            programs = prepare(
                job, chosen, options.device, options.dtype, lambda event: None, limit_bytes=limit
            )
        except Exception as error:
            party.fail(error)

        def make(found: Round) -> tuple[Main, int, Start]:
            nonlocal programs
            if found.info["plan"] is not None:
                plan = parse_plan(found.info["plan"], NAMED)
                if plan != programs.plan:
                    captures = None if programs.whole.objectives else programs.captures
                    programs = prepare(
                        programs.whole, plan, options.device, options.dtype, lambda event: None, captures
                    )
            offset = found.info["clock_offset_ns"]
            task = _task(
                programs.whole, programs.plan, found.folder, options, resume=found.resume,
                num_samples=programs.captures.source.num_samples,
                clock_offset_ns=None if offset is None else offset + found.clock_ns,
                leave_out=frozenset(found.info["leave_out"]), attempt=found.info["attempt"],
            )  # fmt: skip
            return Main(task, programs, None), threads_per_rank(len(found.local), party), start_of(programs)

        summary = party.follow(make, guardian=guardian, hand_on=hand_on)
    return Result.of(summary, Path(summary["folder"]), tuple(programs.choices), programs.whole)


def _write_timeline(folder: Path) -> None:
    """For viewers of Chrome's format, where every rank has left its trace."""
    if any(folder.glob("trace/rank*.json")):
        write_chrome(read_trace(folder), folder / "trace" / "trace.json")
