"""Everything that can be found out before a process starts: the data is opened, the step captured and
compiled.

In: a job and a plan. Out: the programs of its steps, with the opened data; or one error that names what is
wrong with the job. The user's model, loss and optimizer have been tried once when it returns. It never starts
a process.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from plait.errors import CaptureError, JobError, PlanError
from plait.graph.capture.capture import fake_model
from plait.graph.from_job import Captures
from plait.job.checks import problems
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.job.model.weights import load_weights
from plait.job.order import micro_batch_sizes, shares
from plait.options import Listener
from plait.plan.plan import DATA, PIPE, Plan
from plait.program.layout import Layout
from plait.program.program import Program
from plait.program.segment.recompute import Recomputed, compare
from plait.run.prepare.elementwise import check_apart, check_dense, check_divisible
from plait.run.prepare.fits import check_fits, check_host
from plait.run.prepare.offload import with_cheapest_offload
from plait.run.prepare.programs import Programs
from plait.run.prepare.rules import check_alike, check_follows, check_rules
from plait.torch_private.fake import FakeTensorMode

_RATES_LOOKED_AT = 10_000
"""Steps of a run whose last learning rate is looked at before it begins; a scheduler walks through all of them."""


def prepare(
    job: Job,
    plan: Plan,
    device: str,
    dtype: torch.dtype,
    tell: Listener,
    captures: Captures | None = None,
    limit_bytes: int | None = None,
) -> Programs:
    """Open the data, check the job against the plan, capture and compile the first step.

    `captures` are graphs of this job that are known already; a plan that needs more than `limit_bytes` is refused.
    """
    source = (
        captures.source
        if captures is not None
        else open_data(job.data, job.collate, skip_bad=job.skip_bad, drop_last=job.drop_last)
    )
    _check_job(job, source.num_samples, plan)
    job = job.in_steps(source.num_samples)
    check_rules(job, plan)
    if plan.memory.offload == "auto":
        if captures is None and not job.objectives:
            captures = Captures(job, source, dtype, torch.device(device).type)
        return with_cheapest_offload(
            plan,
            torch.device(device),
            tell,
            lambda trial, hear: prepare(job, trial, device, dtype, hear, captures, limit_bytes),
        )
    if job.objectives:
        programs = Programs.several(job, source, plan, torch.device(device), dtype)
    else:
        programs = Programs(job, source, plan, torch.device(device), dtype, captures)
    if job.evaluate is not None:
        programs.held_out = open_data(
            job.evaluate, job.collate, skip_bad=job.skip_bad, drop_last=job.drop_last
        )
    began = time.perf_counter()
    shapes = _try_optimizers(programs)
    if plan.memory.zero > 0:
        _tell_apart(programs)
    firsts = [_first_step(one, programs) for one in programs.parts]
    for one in programs.parts:
        check_alike(shapes, one.captures.first)
    if programs.layout is not None and _needs_whole(programs, programs.layout):
        for one in programs.parts:
            one.hold_whole_tensors()
        firsts = [_first_step(one, programs) for one in programs.parts]
    if plan.memory.offload != "none":
        check_host(firsts)
        for one, first in zip(programs.parts, firsts, strict=True):
            check_apart(
                one.job, [e for b in first.buckets for e in zip(b.parameters, b.shapes, strict=False)]
            )
    check_fits(programs, firsts, limit_bytes)
    notices = dict.fromkeys(
        line for one, at in zip(programs.parts, firsts, strict=True) for line in _notices(at, one)
    )
    found = [
        *_begins_with(job), *_short_of(job, programs.captures.source.num_samples), *notices,
        *_average_notices(programs), *_meeting_notices(programs),
    ]  # fmt: skip
    tell({"compiled_s": time.perf_counter() - began, "notices": found})
    return programs


def _check_job(job: Job, num_samples: int | None, plan: Plan) -> None:
    wrong = [problem.partition("; ") for problem in problems(job, num_samples, plan.data_ranks)]
    if wrong:
        raise JobError(
            "; ".join(what for what, _, _ in wrong) + ".", fix="; ".join(fix for _, _, fix in wrong) + "."
        )


def _needs_whole(programs: Programs, layout: Layout) -> bool:
    """Whether flat groups must be cut between parameters, for the sake of an optimizer; raises where that cannot be."""
    axes = {axis for name in layout.parameters for axis in layout.cut_axes(name)}
    between = programs.capture_error is None and (axes <= {DATA} or axes <= {PIPE})
    needs = False
    for one in programs.parts:
        names = [name for bucket in one.full_step().buckets for name in bucket.parameters]
        shapes = [(name, layout.parameters[name].shape) for name in names]
        needs |= check_divisible(one.job, shapes, one.plan.name, between=between)
    return needs and bool(layout.groups)


def _tell_apart(programs: Programs) -> None:
    """Which parameters get their gradients in the same steps, from the same of several objectives: no others share a
    flat group."""
    phases = programs.whole.freeze
    if len(programs.parts) == 1 and not phases:
        return
    size = micro_batch_sizes(programs.job.batch, programs.job.accumulate)[0]
    try:
        graphs = [one.captures.of_size(size) for one in programs.parts]
    except CaptureError as error:
        if len(programs.parts) == 1:  # what runs eagerly leaves gradients out by itself
            return
        raise PlanError(
            f"plan {programs.plan.name} cuts parameters by what each of several objectives trains, but {error.what}",
            fix=error.fix,
        ) from error
    compiler = programs.compiler
    for entry in graphs[0].inputs_of("parameter"):
        reached = tuple(at for at, graph in enumerate(graphs) if entry.name in graph.gradients)
        frozen = tuple(at for at, phase in enumerate(phases) if phase.names(entry.name))
        compiler.partition = {**compiler.partition, entry.name: (reached, frozen) if reached else ()}


def _first_step(programs: Programs, leading: Programs) -> Program:
    """Compile the steps of one objective, and try its optimizer."""
    job, plan, source = programs.job, programs.plan, programs.captures.source
    if programs is not leading:
        programs.compiler.follow(leading.compiler)
    compiled = [
        programs.for_sizes(
            [shares(size, plan.data_ranks) for size in micro_batch_sizes(count, job.accumulate)]
        )
        for count in _step_sizes(job, source.num_samples)
    ]
    if plan.sync.servers:
        sent = [e for b in compiled[0].buckets for e in zip(b.parameters, b.shapes, strict=True)]
        if plan.sync.servers > 1:
            check_divisible(job, sent, plan.name, between=False)
        else:
            check_dense(job, sent, plan.name)
    return compiled[0]


def _try_optimizers(programs: Programs) -> dict[str, torch.Size]:
    """Build optimizers and schedules once, on parameters that take no memory, before anything is captured.

    Gives the shapes of what is trained.
    """
    shapes: dict[str, torch.Size] = {}
    job, plan = programs.whole, programs.plan
    total = None if job.until is not None else job.total_steps(programs.captures.source.num_samples)
    for one in (job, *(part.job for part in programs.parts if part.job is not job)):
        model = fake_model(one, FakeTensorMode(allow_non_fake_inputs=True))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        shapes |= {name: p.shape for name, p in trained.items()}
        if one is job:
            job.check_names(tuple(trained))
        named = [
            (name, nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape)))
            for name, p in trained.items()
        ]
        optimizer = one.build_optimizer(named)
        schedule = one.build_schedule(optimizer)
        for step in (0,) if total is None or not 0 < total <= _RATES_LOOKED_AT else (0, total - 1):
            schedule.apply(optimizer, step)
        if schedule.follows and one is job:
            check_follows(job, plan)
    return shapes


def _step_sizes(job: Job, num_samples: int | None) -> list[int]:
    """How many samples steps have: the batch, and what is left for the last step of an epoch if the run gets there."""
    order = job.order(num_samples)
    if order is None:
        return [job.batch]
    total = job.total_steps(num_samples)
    ends_an_epoch = total is not None and total >= order.first_step(1)
    return list(order.step_sizes if ends_an_epoch else order.step_sizes[:1])


def effect_of_recompute(program: Program, programs: Programs) -> Recomputed | None:
    """What `memory.recompute` saves and adds in a step, by rank; None where nothing runs again."""
    plan, captures = programs.plan, programs.captures
    if plan.memory.recompute == "none" or programs.capture_error is not None:
        return None
    keeping = replace(plan, memory=replace(plan.memory, recompute="none"))
    others = Programs(programs.job, captures.source, keeping, programs.device, captures.dtype, captures)
    return compare(program, others.for_sizes(program.shares))


def _recompute_notices(program: Program, programs: Programs) -> list[str]:
    setting = programs.plan.memory.recompute
    if setting != "none" and programs.capture_error is not None:
        return ["memory.recompute has no effect on a model that runs eagerly."]
    effect = effect_of_recompute(program, programs)
    name = setting if isinstance(setting, str) else ", ".join(setting)
    return [] if effect is None else [f"recompute {name}: {effect}."]


def _begins_with(job: Job) -> list[str]:
    """Which of the weights come from files, and which names do not fit."""
    if job.weights is None:
        return []
    bare = replace(job, weights=None).build_model()
    return load_weights(copy_of(bare) if bare is job.model else bare, Path(job.weights)).lines()


def _short_of(job: Job, num_samples: int | None) -> list[str]:
    """That steps are smaller than the job asks for."""
    if num_samples is None or num_samples >= job.batch:
        return []
    return [
        f"the batch is {job.batch}, and the data has {num_samples} samples: every step has {num_samples}."
    ]


def _average_notices(programs: Programs) -> list[str]:
    """That statistics of batch norm are not those of averaged weights, or how they become it."""
    rule = programs.whole.average
    if rule is None or not any(
        name.endswith("running_var") for name, _ in programs.whole.build_model().named_buffers()
    ):
        return []
    if rule.update_bn:
        return [
            f"average: batch norm sees the batches of {rule.update_bn} steps before each evaluation and checkpoint."
        ]
    if rule.kind == "ema" or rule.buffers:
        return []
    return [
        "average: the statistics of batch norm are those of the last weights. Fix: Average(..., update_bn=100)."
    ]


def _meeting_notices(programs: Programs) -> list[str]:
    """That workers which mix their weights now and then do not come to it, or are measured before."""
    plan, job = programs.plan, programs.whole
    agreement = plan.agreement
    total = job.total_steps(programs.captures.source.num_samples)
    if agreement.mix is None or agreement.round is None or agreement.warmup:
        return []
    first, found = agreement.round, []
    name = f"{'elastic.tau' if agreement.mix == 'elastic' else 'average.every'}={first}"
    meets = (
        "the center has not moved: the weights are the first ones"
        if agreement.mix == "elastic"
        else "nothing was mixed"
    )
    if total is not None and total < first:
        found.append(
            f"workers meet every {first} steps ({name}) and the run has {total}; to its end {meets}."
            " Fix: train longer, or let them meet more often."
        )
    elif job.evaluate is not None and (job.evaluate_every or first) < first:
        found.append(f"workers meet every {first} steps ({name}); in evaluations before that {meets}.")
    return found


def _notices(program: Program, programs: Programs) -> list[str]:
    found = [*programs.choices, *program.notices, *_recompute_notices(program, programs)]
    if programs.capture_error is None:
        unused = programs.captures.latest(program.micro_batches[0]).unused
        if unused:
            found.append(f"unused by the loss, not trained: {', '.join(unused)}.")
    if program.gathered and program.plan.mesh.size > 1:
        ops = sorted({entry.op for entry in program.gathered if not entry.by_torch})
        if ops:
            found.append(f"tensors are gathered on every rank for {', '.join(ops)}: correct, but slower.")
    return found
