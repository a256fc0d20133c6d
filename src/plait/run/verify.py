"""Prove that a plan computes what one process computes, and that what one process computes is the user's own code.

In: a job, a plan. Out: the largest differences in loss, gradients, weights and buffers after k steps, and the
first tensor that differs beyond the tolerance. The reference is the `single` plan on the same micro-batches, itself
compared with the user's module and loss in a plain PyTorch loop (`eager_run.py`).

Tolerances (float64): 1e-9 of the tensor's largest value, with a floor of 1e-12 of the global norm. In fp32:
losses and the first step's gradients within 1e-5 with a floor of 1e-5 of the global norm; weights within 10
times of what one process differs from itself when its batch is halved.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from plait.errors import UsageError
from plait.graph.from_job import Captures
from plait.graph.ops.replay import NotReplayableError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.origin import told
from plait.options import Listener, Trial
from plait.plan.named import resolve, usual_ranks
from plait.plan.plan import Plan
from plait.run.checkpoint.store import load_checkpoint
from plait.run.hold.copies import spread
from plait.run.interpret.serial import Reduce, add_up
from plait.run.proof.compare import FP32, FP32_FLOOR, Difference, compare, largest_by_kind, norm, relative
from plait.run.proof.deviation import deviation_of
from plait.run.proof.eager_run import run_eager
from plait.run.proof.scratch import scratch_folder
from plait.run.proof.serial_run import Record, run_serially
from plait.run.start.follower import Follower
from plait.run.start.party import join, place_here, ranks_wanted, telling
from plait.run.train import Result, train

_FLOAT64 = 1e-9
"""What parity means in float64, as a share of a tensor's largest value."""
_BF16 = 2**-6
"""A bf16 number is off by up to 2**-8; a gradient is the sum of a few parts that were rounded so."""
_FP32_WEIGHT_LIMIT = 2e-3
"""What AdamW made of rounding between two right answers, at most; used where the self-difference says nothing."""


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

    @property
    def ok(self) -> bool:
        """Whether everything is within its tolerance."""
        return self.first is None and self.eager_first is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What one process computes, and how closely others must agree; good for any number of plans."""

    job: Job
    """As it was run: `steps` steps, in the dtype of the comparison."""
    steps: int
    dtype: torch.dtype
    captures: Captures
    """The graphs of the job."""
    record: Record
    rough: bool
    """Whether it was not computed in float64 throughout."""
    tolerance: float
    """Of losses and gradients."""
    weight_tolerance: float
    """Of weights and buffers."""
    eager: tuple[Difference, ...] | str
    """How far the user's own code in a plain loop is from it, tensor by tensor; or why that is not known."""


@kept_generators()
def reference_of(
    job: Job,
    *,
    steps: int = 3,
    fp32: bool = False,
    listener: Listener | None = None,
    captures: Captures | None = None,
) -> Reference:
    """Run `steps` steps of the plan `single`; `captures` are graphs of this model on this data that are known."""
    tell = listener if listener is not None else (lambda event: None)
    dtype = torch.float32 if fp32 else torch.float64
    job = _as_compared(job, steps, fp32)
    one = resolve("single", 1)
    captures = captures if captures is not None else Captures(job, None, dtype)
    tell({"stage": f"one process, {steps} steps"})
    record = run_serially(job, one, steps, dtype, captures=captures)
    tolerance = weight_tolerance = _FLOAT64
    rough = fp32 or record.rounds_to_float32
    if rough:
        tell({"stage": "one process with its batch halved, for the tolerance"})
        tolerance = _BF16 if job.precision == "bf16" else FP32
        difference = _self_difference(job, one, steps, record, dtype, captures)
        # a model that rounds by itself rounds each sample alone, which halving the batch does not show
        weight_tolerance = max(tolerance * (10 if record.rounds_to_float32 else 1), difference)
    return Reference(
        job=job, steps=steps, dtype=dtype, captures=captures, record=record, rough=rough,
        tolerance=tolerance, weight_tolerance=weight_tolerance,
        eager=_against_eager(job, record, captures, dtype, rough, tolerance, weight_tolerance, tell),
    )  # fmt: skip


def _as_compared(job: Job, steps: int, fp32: bool) -> Job:
    """The job as it is run for a comparison."""
    job = replace(job, steps=steps, epochs=None, evaluate=None, evaluate_every=None, metrics=None, until=None)
    return job if fp32 else replace(in_float64(job), precision="fp32")


def _against_eager(
    job: Job, record: Record, captures: Captures, dtype: torch.dtype, rough: bool, tolerance: float,
    weight_tolerance: float, tell: Listener,
) -> tuple[Difference, ...] | str:  # fmt: skip
    """One process against the user's own module and loss, run eagerly on the same samples."""
    if captures.source.num_samples is None:
        return "a stream is read once"
    tell({"stage": f"the user's own code in a plain loop, {len(record.losses)} steps"})
    try:
        eager = run_eager(job, len(record.losses), dtype, captures)
    except NotReplayableError:
        return "its random numbers cannot be drawn in the same order"
    except Exception as error:
        return f"it fails in {str(dtype).removeprefix('torch.')}{told(error)}"
    return tuple(
        compare(
            eager,
            replace(record, spread=None),
            rough=rough,
            tolerance=tolerance,
            weight_tolerance=weight_tolerance,
        )
    )


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
) -> Verification:
    """Run `steps` steps both ways and compare; `against` is this job's reference where it is known already.

    Without a plan it is ddp, or what the axes of `mesh` say; a named plan without `ranks` is run on 2.
    """
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
    tell = listener if listener is not None else (lambda event: None)
    party = join(place, chosen.ranks) if place is not None else None
    if isinstance(party, Follower):
        dtype = torch.float32 if fp32 else torch.float64
        return _take_part(_as_compared(job, steps, fp32), chosen, steps, dtype, device)
    with telling(party):
        return _compared(job, chosen, steps, fp32, serial, device, reduce, tell, against)


def _take_part(job: Job, plan: Plan, steps: int, dtype: torch.dtype, device: str) -> Verification:
    """As a task that is not the first, which compares: run what it compares."""
    _train(job, plan, None, dtype, device, lambda event: None)
    name = str(dtype).removeprefix("torch.")
    return Verification(
        plan=plan, steps=steps, dtype=name, serial=False, differences=(), first=None, notices=()
    )


def _compared(
    job: Job, chosen: Plan, steps: int, fp32: bool, serial: bool, device: str, reduce: Reduce, tell: Listener,
    against: Reference | None,
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
        else _run_processes(job, chosen, known.steps, dtype, device, tell)
    )
    found = compare(
        known.record,
        record,
        rough=known.rough,
        tolerance=known.tolerance,
        weight_tolerance=known.weight_tolerance,
    )
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
            *_rounding_notice(known.record),
            *_deviation_notice(deviation),
            *([f"not compared with the user's own code: {eager}."] if isinstance(eager, str) else []),
        ),
        eager=() if isinstance(eager, str) else largest_by_kind(eager),
        eager_first=None
        if isinstance(eager, str)
        else next((difference for difference in eager if not difference.ok), None),
    )


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


def in_float64(job: Job) -> Job:
    """The job with its loss module, which may hold class weights, in float64."""
    if isinstance(job.loss, nn.Module):
        return replace(job, loss=copy.deepcopy(job.loss).double())
    return job


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


def _rounding_notice(reference: Record) -> list[str]:
    if reference.rounds_to_float32:
        return ["the model casts to float32 by itself, so the tolerances are those of float32."]
    return []


def _train(
    job: Job, plan: Plan, folder: Path | None, dtype: torch.dtype, device: str, tell: Listener
) -> Result:
    trial = Trial(dtype="float64" if dtype == torch.float64 else "float32", record_gradients=True)
    return train(job, plan, out=folder, device=device, trace=False, listener=tell, trial=trial)


def _run_processes(
    job: Job, plan: Plan, steps: int, dtype: torch.dtype, device: str, tell: Listener
) -> Record:
    with scratch_folder() as scratch:
        folder = scratch / "run"
        result = _train(job, plan, folder, dtype, device, tell)
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


def _self_difference(
    job: Job, plan: Plan, steps: int, reference: Record, dtype: torch.dtype, captures: Captures
) -> float:
    """10 times what one process differs from itself when its batch is halved; noise, not a fault."""
    doubled = min(job.accumulate * 2, job.batch)
    halved = run_serially(replace(job, accumulate=doubled), plan, steps, dtype, captures=captures)
    floor = norm(reference.weights.values()) * FP32_FLOOR
    worst = max(
        (relative(reference.weights[n], halved.weights[n], floor) for n in reference.weights), default=0.0
    )
    changes_the_model = worst > 1e-2  # batch statistics and random masks depend on the micro-batches
    return _FP32_WEIGHT_LIMIT if changes_the_model else 10 * worst
