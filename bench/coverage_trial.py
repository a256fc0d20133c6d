"""One case of the coverage sweep: captured or not, and equal to the user's own code under every plan or not.

In: a `Case`. Out: an outcome of every plan, in a few words. All ranks of a plan run in this process, two steps of SGD
in float32, two micro-batches of two samples each, dropout as the model has it.

Equal means: losses, every gradient of the first step, and all weights and buffers after the second are within `CLOSE`
of the tensor's largest value, with a floor of 1e-5 (gradients) and 1e-4 (weights, buffers) of the norm of all of
them. Where that is missed, the model's own condition counts: how far the eager loop is from itself when each weight
is changed in its last bits, times `NOISE`.
"""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.coverage_models.case import Case
from plait.errors import CaptureError, PlaitError
from plait.graph.from_job import Captures
from plait.graph.ops.replay import NotReplayableError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.compare import Difference, compare
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import Record, run_serially

PLANS = ("single", "ddp", "zero3", "megatron", "1f1b")
STEPS = 2
"""Steps that are compared."""
CLOSE = 1e-4
"""How far two right answers in float32 may be apart, as a share of a tensor's largest value."""
NOISE = 20.0
"""Times what a change in the last bits of the weights makes of the same loop."""
CLOSE_SHORT = 2.0**-4
"""The same of a model in bfloat16, whose numbers have eight bits."""
LAST_BITS = 2.0**-23
"""A relative change that float32 just sees; other dtypes have their own."""
EQUAL = "equal"


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What became of a case."""

    captured: bool = False
    why_not: str = ""
    """What stopped the capture."""
    plans: dict[str, str] = field(default_factory=dict)
    """`equal`, `differs: ...`, `refused: ...` (an error of plait's, for people), or `failed: ...` (any other
    exception)."""
    seconds: float = 0.0
    traces: dict[str, str] = field(default_factory=dict)
    """Where exceptions came from."""


def job_of(case: Case) -> Job:
    """The job of a case."""
    return Job(
        model=case.model,
        data=list(case.samples),
        objective=case.objective,
        optimizer=partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        batch=4,
        accumulate=2,
        steps=STEPS,
    )


def attempt(case: Case, plans: Sequence[str] = PLANS) -> Outcome:
    """Try a case under every plan; it is compared with the plain loop, never with another plan."""
    began, outcome, job = time.perf_counter(), Outcome(), job_of(case)
    captures = Captures(job, None, torch.float32)
    try:
        captures.of_batch(captures.example, 2)
        outcome.captured = True
    except CaptureError as error:
        outcome.why_not = short(error)
    except Exception as error:
        outcome.why_not = f"failed: {short(error)}"
        outcome.traces["capture"] = traceback.format_exc(limit=-8)
    reference: Record | str
    try:
        reference = run_eager(job, STEPS, torch.float32, captures)
    except NotReplayableError as error:
        reference = f"not comparable: {error}"
    except Exception as error:
        reference = f"the plain loop fails: {short(error)}"
        outcome.traces["eager"] = traceback.format_exc(limit=-8)
    for plan in plans:
        outcome.plans[plan] = _under(job, plan, captures, reference, outcome)
        if (
            outcome.plans[plan].startswith("differs") and captures.questions.hide()
        ):  # as a run's first step does
            captures.forget()
            outcome.plans[plan] = _under(job, plan, captures, reference, outcome)
    outcome.seconds = time.perf_counter() - began
    return outcome


def _under(job: Job, plan: str, captures: Captures, reference: Record | str, outcome: Outcome) -> str:
    try:
        record = run_serially(
            job, resolve(plan, 1 if plan == "single" else 2), STEPS, torch.float32, captures=captures
        )
    except PlaitError as error:
        return f"refused: {short(error)}"
    except Exception as error:
        outcome.traces[plan] = traceback.format_exc(limit=-8)
        return f"failed: {short(error)}"
    if isinstance(reference, str):
        return reference
    short_floats = any(value.dtype == torch.bfloat16 for value in reference.weights.values())
    found = _differences(reference, _with_zeros(record, reference), CLOSE_SHORT if short_floats else CLOSE)
    if found:
        noise = _noise(job, captures, reference)
        found = [d for d in found if d.largest > NOISE * noise.get(d.kind, 0.0)]
    if not found:
        return EQUAL
    return f"differs: {found[0].kind} {found[0].name} by {found[0].largest:.1e}"


def _with_zeros(record: Record, reference: Record) -> Record:
    """A parameter that the loss does not reach has no gradient in eager, and zeros where plait runs eagerly."""
    kept = [
        {name: gradient for name, gradient in ours.items() if name in theirs or bool(gradient.any())}
        for ours, theirs in zip(record.gradients, reference.gradients, strict=True)
    ]
    return replace(record, gradients=tuple(kept))


def _differences(reference: Record, record: Record, limit: float) -> list[Difference]:
    found = compare(reference, record, rough=True, tolerance=limit, weight_tolerance=limit)
    return [difference for difference in found if not difference.ok]


def _noise(job: Job, captures: Captures, reference: Record) -> dict[str, float]:
    """By kind of tensor: how far the plain loop is from itself when every weight is changed in its last bits."""

    def build() -> nn.Module:
        model = job.build_model()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(-1, 2, parameter.shape, generator=draw)
                    bits = max(LAST_BITS, torch.finfo(parameter.dtype).eps)
                    parameter.mul_(1 + bits * signs)
        return model

    try:
        other = run_eager(replace(job, model=build), STEPS, torch.float32, captures)
    except Exception:
        return {}
    largest: dict[str, float] = {}
    for difference in compare(reference, other, rough=True, tolerance=0.0, weight_tolerance=0.0):
        largest[difference.kind] = max(largest.get(difference.kind, 0.0), difference.largest)
    return largest


def short(error: BaseException) -> str:
    """An error on one line."""
    text = error.what if isinstance(error, PlaitError) else str(error)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def as_json(outcome: Outcome) -> dict[str, Any]:
    """For a line of the cache."""
    return {
        "captured": outcome.captured,
        "why_not": outcome.why_not,
        "plans": outcome.plans,
        "seconds": round(outcome.seconds, 1),
        "traces": outcome.traces,
    }
