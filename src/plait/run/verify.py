"""Prove that a plan computes what one process computes.

In: a job, a plan. Out: the largest differences in loss, gradients, weights and buffers after k steps, and the first tensor that
differs beyond the tolerance. The reference is the `single` plan on the same micro-batches.

Tolerances (float64): 1e-9 of the tensor's largest value, with a floor of 1e-12 of the global norm. In fp32: losses and the first
step's gradients within 1e-5 with a floor of 1e-5 of the global norm; weights within 10 times of what one process differs from itself
when its batch is halved.
"""

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from plait.job.job import Job
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.checkpoint import load_checkpoint
from plait.run.serial import Reduce, add_up
from plait.run.serial_run import Record, run_serially
from plait.run.train import Listener, train

_FP32_GRADIENT = 1e-5
_FP32_FLOOR = 1e-4
_FP32_WEIGHT_LIMIT = 2e-3
"""What AdamW made of rounding between two right answers, at most; used where the self-difference says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest difference of one kind."""

    kind: str
    """loss, gradient, weight, buffer, norm."""
    name: str
    """The tensor, with its step."""
    largest: float
    """Relative to the tensor's largest value, or to the floor."""
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether it is within the tolerance; not a number never is."""
        return self.largest <= self.tolerance


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

    @property
    def ok(self) -> bool:
        """Whether everything is within its tolerance."""
        return self.first is None


def verify(
    job: Job,
    plan: str | Path | Plan = "ddp",
    ranks: int | None = None,
    *,
    steps: int = 3,
    fp32: bool = False,
    serial: bool = False,
    device: str = "cpu",
    settings: Mapping[str, object] | None = None,
    reduce: Reduce = add_up,
    listener: Listener | None = None,
) -> Verification:
    """Run `steps` steps both ways and compare."""
    chosen = resolve(plan, ranks, settings)
    dtype = torch.float32 if fp32 else torch.float64
    job = replace(job, steps=steps, epochs=None, evaluate=None, metrics=None, until=None)
    if not fp32:
        job = replace(in_float64(job), precision="fp32")
    one = resolve("single", 1)
    tell = listener if listener is not None else (lambda event: None)
    tell({"stage": f"one process, {steps} steps"})
    reference = run_serially(job, one, steps, dtype)
    weight_tolerance = 1e-9
    if fp32:
        tell({"stage": "one process with its batch halved, for the tolerance"})
        weight_tolerance = _self_difference(job, one, steps, reference)
    tell({"stage": f"{chosen.name} on {chosen.mesh.size} ranks"})
    record = (
        run_serially(job, chosen, steps, dtype, reduce=reduce)
        if serial
        else _run_processes(job, chosen, steps, dtype, device, tell)
    )
    found = compare(reference, record, fp32=fp32, weight_tolerance=weight_tolerance)
    return Verification(
        plan=chosen,
        steps=steps,
        dtype="float32" if fp32 else "float64",
        serial=serial,
        differences=_largest_by_kind(found),
        first=next((difference for difference in found if not difference.ok), None),
        notices=(*record.notices, *_batch_norm_notice(job, record, chosen)),
    )


def in_float64(job: Job) -> Job:
    """The job with its loss module, which may hold class weights, in float64."""
    if isinstance(job.loss, nn.Module):
        return replace(job, loss=copy.deepcopy(job.loss).double())
    return job


def _batch_norm_notice(job: Job, record: Record, plan: Plan) -> list[str]:
    has = any(name.endswith("running_mean") for name in record.buffers)
    if has and job.batch_norm == "local" and plan.mesh.size > 1:
        return ["batch_norm='local': each rank normalizes its own share, so a difference from one process is expected."]
    return []


def _run_processes(job: Job, plan: Plan, steps: int, dtype: torch.dtype, device: str, tell: Listener) -> Record:
    with tempfile.TemporaryDirectory(prefix="plait-verify-") as scratch:
        folder = Path(scratch) / "run"
        result = train(
            job, plan, out=folder, dtype=dtype, device=device, record_gradients=True, trace=False, listener=tell
        )
        state = load_checkpoint(folder)
        gradients = tuple(load_file(path) for path in sorted(folder.glob("gradients-*.safetensors")))
    return Record(
        losses=result.losses,
        norms=(),
        gradients=gradients,
        weights=state.parameters,
        buffers=state.buffers,
        spread=0.0,
        notices=result.notices,
    )


def _self_difference(job: Job, plan: Plan, steps: int, reference: Record) -> float:
    """10 times what one process differs from itself when its batch is halved; noise, not a fault."""
    doubled = min(job.accumulate * 2, job.batch)
    halved = run_serially(replace(job, accumulate=doubled), plan, steps, torch.float32)
    floor = _norm(reference.weights.values()) * _FP32_FLOOR
    worst = max((_relative(reference.weights[n], halved.weights[n], floor) for n in reference.weights), default=0.0)
    changes_the_model = worst > 1e-2  # batch statistics and random masks depend on the micro-batches
    return _FP32_WEIGHT_LIMIT if changes_the_model else max(_FP32_GRADIENT, 10 * worst)


def compare(reference: Record, record: Record, *, fp32: bool, weight_tolerance: float) -> list[Difference]:
    """Every tensor of two runs, in the order of computation."""
    value = _FP32_GRADIENT if fp32 else 1e-9
    found = [
        Difference(kind="loss", name=f"loss of step {step}", largest=_number(a, b), tolerance=value * (1 if step == 0 else 100 if fp32 else 1))
        for step, (a, b) in enumerate(zip(reference.losses, record.losses, strict=True))
    ]
    for step, (ours, theirs) in enumerate(zip(reference.gradients, record.gradients, strict=True)):
        if fp32 and step > 0:  # from the second step on, AdamW has amplified the rounding of the first
            break
        floor = _norm(ours.values()) * (1e-5 if fp32 else 1e-3)
        for name in ours:
            largest = _relative(ours[name], theirs[name], floor) if name in theirs else math.inf
            found.append(Difference(kind="gradient", name=f"{name} at step {step}", largest=largest, tolerance=value))
    for kind, ours, theirs in (("weight", reference.weights, record.weights), ("buffer", reference.buffers, record.buffers)):
        floor = _norm(t for t in ours.values() if t.is_floating_point()) * (_FP32_FLOOR if fp32 else 1e-3)
        for name, tensor in ours.items():
            largest = _relative(tensor, theirs[name], floor) if name in theirs else math.inf
            found.append(
                Difference(kind=kind, name=f"{name} after {len(record.losses)} steps", largest=largest, tolerance=weight_tolerance)
            )
    found.append(Difference(kind="spread", name="weights between ranks", largest=record.spread, tolerance=0.0))
    return found


def _relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    """Largest difference relative to the largest value; `floor` is the smallest value it is compared with."""
    if ours.shape != theirs.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    a, b = ours.double(), theirs.double()
    difference = float((a - b).abs().max())
    return difference / max(float(a.abs().max()), floor, 1e-300) if difference else 0.0


def _number(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-300) if a != b else 0.0


def _norm(tensors: object) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))  # type: ignore[attr-defined]


def _largest_by_kind(found: list[Difference]) -> tuple[Difference, ...]:
    best: dict[str, Difference] = {}
    for difference in found:
        known = best.get(difference.kind)
        if known is None or difference.largest > known.largest or difference.largest != difference.largest:
            best[difference.kind] = difference
    return tuple(best.values())
