"""Prove that a plan computes what one process computes, and that what one process computes is the user's own code.

In: a job, a plan. Out: the largest differences in loss, gradients, weights and buffers after k steps, and the
first tensor that differs beyond the tolerance. The reference is the `single` plan on the same micro-batches, itself
compared with the user's module and loss in a plain PyTorch loop (`eager_run.py`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from plait.callbacks import Watching
from plait.errors import UsageError
from plait.files.scratch import scratch_folder
from plait.graph.from_job import Captures
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Listener, Saving, Trial
from plait.plan.named import resolve, usual_ranks
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.away.copies import spread
from plait.run.interpret.serial import Reduce, add_up
from plait.run.proof.compare import Difference, largest_by_kind
from plait.run.proof.deviation import deviation_of
from plait.run.proof.reference import Reference, as_compared, differences_from, reference_of
from plait.run.proof.serial_run import Record, run_serially
from plait.run.record.result import Result
from plait.run.start.party import join, place_here, ranks_wanted, telling
from plait.run.start.tasks.follower import Follower
from plait.run.train import train
from plait.torch_private.wrappers import is_wrapper


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What was compared, and what came out."""

    plan: Plan
    steps: int
    dtype: str
    serial: bool
    differences: tuple[Difference, ...]
    """The largest of each kind."""
    first: Difference | None
    """The first tensor over its tolerance, in the order of computation."""
    notices: tuple[str, ...]
    eager: tuple[Difference, ...] = ()
    """The same of one process against the user's own code in a plain loop; empty: not compared, as a notice says."""
    eager_first: Difference | None = None
    """The first tensor in which one process differs from the user's own code."""
    draws: tuple[Difference, ...] = ()
    """How random numbers differ from torch's own, by their statistics; empty: the job draws none."""
    draws_first: Difference | None = None
    """The first of these that chance does not explain."""
    deviation: str | None = None
    """Why one rank computes something else, so that processes were compared with all ranks in one process."""

    @property
    def ok(self) -> bool:
        """Whether everything is within its tolerance."""
        return self.first is None and self.eager_first is None and self.draws_first is None


@kept_generators()
def verify(
    job: Job,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    steps: int = 3,
    fp32: bool = False,
    serial: bool = False,
    device: str = "cpu",
    settings: Mapping[str, object] | None = None,
    mesh: Mapping[str, int] | None = None,
    reduce: Reduce = add_up,
    listener: Listener | None = None,
    against: Reference | None = None,
    emulate: str | None = None,
) -> Verification:
    """Run `steps` steps both ways and compare; `against` is this job's reference where it is known already.

    Of several objectives, each has at least one turn.

    Without a plan it is ddp, or what the axes of `mesh` say; a named plan without `ranks` is run on 2.
    """
    if emulate is not None and serial:
        raise UsageError(
            "ranks in one process have no network to emulate.", fix="give either serial or emulate."
        )
    if reduce is not add_up and not serial:
        raise UsageError(
            "another reduction can be planted in the serial interpreter only.", fix="give serial=True."
        )
    place = None if serial else place_here()
    ranks = ranks_wanted(place, plan, ranks, mesh)
    chosen = resolve(plan, ranks if ranks is not None or mesh else usual_ranks(plan), settings, mesh)
    if chosen.pipe.asynchronous and job.accumulate > 1:
        raise UsageError(
            f"plan {chosen.name} makes each of the {job.accumulate} micro-batches of a step an update of its own, on "
            "weights that may be some updates old: no run of one process computes the same.",
            fix="verify it with accumulate=1, for which both must agree.",
        )
    _refuse_what_depends_on_time(chosen)
    steps = max(steps, sum(entry.repeat for entry in job.objectives))  # each objective has its turn
    fp32 = fp32 or _made_of_others(job) is not None
    tell = listener if listener is not None else (lambda event: None)
    party = join(place, chosen.ranks) if place is not None else None
    if isinstance(party, Follower):
        dtype = torch.float32 if fp32 else torch.float64
        return _take_part(as_compared(job, steps, fp32), chosen, steps, dtype, device)
    with telling(party):
        return _compared(job, chosen, steps, fp32, serial, device, reduce, tell, against, emulate)


def _take_part(job: Job, plan: Plan, steps: int, dtype: torch.dtype, device: str) -> Verification:
    """As a task that is not the first, which compares: run what it compares."""
    _train(job, plan, None, dtype, device, lambda event: None)
    name = str(dtype).removeprefix("torch.")
    return Verification(
        plan=plan, steps=steps, dtype=name, serial=False, differences=(), first=None, notices=()
    )


def _compared(
    job: Job, chosen: Plan, steps: int, fp32: bool, serial: bool, device: str, reduce: Reduce, tell: Listener,
    against: Reference | None, emulate: str | None,
) -> Verification:  # fmt: skip
    known = against if against is not None else reference_of(job, steps=steps, fp32=fp32, listener=tell)
    job, dtype, eager = known.job, known.dtype, known.eager
    deviation = deviation_of(chosen)
    if deviation is not None:
        known = _own_reference(known, chosen, deviation, serial, tell)
    tell({"stage": f"{chosen.name} on {chosen.mesh.size} ranks"})
    record = (
        run_serially(job, chosen, known.steps, dtype, reduce=reduce, captures=known.captures)
        if serial
        else _run_processes(known, chosen, device, tell, emulate)
    )
    found = differences_from(known, record)
    return Verification(
        plan=chosen,
        steps=known.steps,
        dtype=str(dtype).removeprefix("torch."),
        serial=serial,
        differences=largest_by_kind(found),
        first=next((difference for difference in found if not difference.ok), None),
        notices=(
            *record.notices,
            *_batch_norm_notice(job, record, chosen),
            *_wrapper_notice(job),
            *([known.eager_notice] if known.eager_notice is not None else []),
            *_deviation_notice(deviation),
            *([f"not compared with the user's own code: {eager}."] if isinstance(eager, str) else []),
            *([known.draws_notice] if known.draws_notice is not None else []),
        ),
        eager=() if isinstance(eager, str) else largest_by_kind(eager),
        eager_first=None
        if isinstance(eager, str)
        else next((difference for difference in eager if not difference.ok), None),
        draws=largest_by_kind(known.draws),
        draws_first=next((difference for difference in known.draws if not difference.ok), None),
        deviation=deviation,
    )


def _made_of_others(job: Job) -> str | None:
    """A parameter that is a tensor made of others, which have no float64."""
    named = job.build_model().named_parameters()
    return next((f"{name} ({type(p).__name__})" for name, p in named if is_wrapper(p)), None)


def _wrapper_notice(job: Job) -> list[str]:
    found = _made_of_others(job)
    return [f"compared in float32: {found} is a tensor made of others."] if found is not None else []


def _refuse_what_depends_on_time(plan: Plan) -> None:
    sync, workers = plan.sync, plan.mesh.size
    agreement = plan.agreement
    if agreement.needs_order and workers > 1:
        alone = f"--ranks {1 + sync.servers}, whose only worker must equal one process"
        ways = [
            *([alone] if agreement.mix is None else []),
            *([f"--set {agreement.mended}"] if agreement.mended else []),
        ]
        raise UsageError(
            f"what {workers} workers of {sync.rule} compute depends on which of them comes first: no run of one "
            "process computes the same.",
            fix=f"verify it with {', or with '.join(ways)}.",
        )


def _own_reference(known: Reference, plan: Plan, deviation: str, serial: bool, tell: Listener) -> Reference:
    """What all ranks of a plan that one rank cannot stand for compute in one process."""
    if serial:
        raise UsageError(
            f"{deviation}: no run of one rank computes the same; processes are compared with all ranks in one process.",
            fix="verify it without --serial.",
        )
    tell({"stage": f"{plan.name} on {plan.mesh.size} ranks in one process"})
    return replace(
        known, record=run_serially(known.job, plan, known.steps, known.dtype, captures=known.captures)
    )


def _deviation_notice(deviation: str | None) -> list[str]:
    if deviation is None:
        return []
    return [
        f"{deviation}: one rank computes something else. Compared were processes with all ranks in one process."
    ]


def _batch_norm_notice(job: Job, record: Record, plan: Plan) -> list[str]:
    has = any(name.endswith("running_mean") for name in record.buffers)
    if has and job.batch_norm == "local" and plan.mesh.size > 1:
        return [
            "batch_norm='local': each rank normalizes its own share, so a difference from one process is expected."
        ]
    if has and plan.agreement.is_late and plan.mesh.size > 1:
        return [
            f"{plan.name}: each worker normalizes its own share, so a difference from one process is expected."
        ]
    return []


def _train(
    job: Job,
    plan: Plan,
    folder: Path | None,
    dtype: torch.dtype,
    device: str,
    tell: Listener,
    emulate: str | None = None,
    captures: Captures | None = None,
) -> Result:
    trial = Trial(
        dtype="float64" if dtype == torch.float64 else "float32", record_gradients=True, emulate=emulate
    )
    return train(
        job, plan, out=folder, device=device, saving=Saving(trace=False), trial=trial,
        watching=Watching(listener=tell), captures=captures,
    )  # fmt: skip


def _run_processes(known: Reference, plan: Plan, device: str, tell: Listener, emulate: str | None) -> Record:
    captures = known.captures.reopened() if device == "cpu" and not known.job.objectives else None
    with scratch_folder() as scratch:
        folder = scratch / "run"
        result = _train(known.job, plan, folder, known.dtype, device, tell, emulate, captures)
        state = load_checkpoint(folder)
        gradients = tuple(load_file(path) for path in sorted(folder.glob("gradients-??????.safetensors")))
        held = [load_file(path) for path in sorted(folder.glob("held-??????.safetensors"))]
        norms = _norms(folder / "metrics.jsonl")
    return Record(
        losses=result.losses,
        norms=norms,
        gradients=gradients,
        weights=state.parameters,
        buffers=state.buffers,
        spread=spread(held) if held else None,
        notices=result.notices,
    )


def _norms(metrics: Path) -> tuple[float, ...] | None:
    """The gradient norms that a run wrote down; None: it clipped nothing, or a server did."""
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = tuple(entry["grad_norm"] for entry in entries if "grad_norm" in entry)
    return found or None
