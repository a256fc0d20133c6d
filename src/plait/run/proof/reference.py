"""What a plan is compared with: one process, itself compared with the user's own code in a plain loop.

In: a job. Out: a `Reference`: the record of the plan `single` on the same micro-batches, and how closely others must
agree.

Tolerances (float64): 1e-9 of the tensor's largest value, with a floor of 1e-12 of the global norm. In fp32:
losses and the first step's gradients within 1e-5 with a floor of 1e-5 of the global norm; weights within 10
times of what one process differs from itself when its batch is halved. In fewer bits each tensor may also be off by
5 times what one process in float32 differs from it: gradients that are zero but for rounding are in every attention.
"""

from dataclasses import dataclass, replace

import torch

from plait.errors import StepError
from plait.graph.capture.widen import WITHOUT_FLOAT64
from plait.graph.from_job import Captures
from plait.graph.ops.draws import Drawn
from plait.graph.ops.replay import NotReplayableError, OtherChanceError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.origin import told
from plait.options import Listener
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.proof.compare import FP32, FP32_FLOOR, Difference, Noise, compare, noise_of, norm, relative
from plait.run.proof.draws import check_draws, other_chance
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import Record, run_serially

_FLOAT64 = 1e-9
"""What parity means in float64, as a share of a tensor's largest value."""
_BF16 = 2**-6
"""A bf16 number is off by up to 2**-8; a gradient is the sum of a few parts that were rounded so."""
_MOST_NOISE = 2**-4
"""Of gradients that were rounded to 16 bits on their way; a sum that misses a part is off by more."""
FP8 = 2**-2
"""The same of a number of 8 bits, which is off by up to 2**-4."""
_FP32_WEIGHT_LIMIT = 2e-3
"""What AdamW made of rounding between two right answers, at most; used where the self-difference says nothing."""


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
    eager_notice: str | None = None
    """Why the user's own code was compared in float32."""
    draws: tuple[Difference, ...] = ()
    """How its random numbers differ from torch's own by their statistics, and where they depend on each other."""
    draws_notice: str | None = None
    """What of that would have been found."""


@kept_generators()
def reference_of(
    job: Job,
    *,
    steps: int = 3,
    fp32: bool = False,
    listener: Listener | None = None,
    captures: Captures | None = None,
    eager: bool = True,
) -> Reference:
    """Run `steps` steps of the plan `single`; `captures` are graphs of this model on this data that are known.

    `eager`: compare it with the user's own code too.
    """
    tell = listener if listener is not None else (lambda event: None)
    dtype = torch.float32 if fp32 else torch.float64
    job = as_compared(job, steps, fp32)
    one = resolve("single", 1)
    captures = captures if captures is not None else Captures(job, None, dtype)
    tell({"stage": f"one process, {steps} steps"})
    record = _run(job, one, steps, dtype, captures)
    tolerance = weight_tolerance = _FLOAT64
    rough = fp32 or (captures.first is not None and bool(captures.first.short))
    if rough:
        tell({"stage": "one process with its batch halved, for the tolerance"})
        tolerance = {"fp32": FP32, "fp8": FP8}.get(job.precision, _BF16)
        of_gradients, of_weights = _self_difference(job, one, steps, record, dtype, captures)
        if job.precision != "fp32":
            tolerance = max(tolerance, of_gradients)
        weight_tolerance = max(tolerance, of_weights)
    known = Reference(
        job=job, steps=steps, dtype=dtype, captures=captures, record=record, rough=rough,
        tolerance=tolerance, weight_tolerance=weight_tolerance, eager=(),
    )  # fmt: skip
    if not eager:
        return replace(known, eager="nobody asked for it")
    known = _with_eager(known, tell)
    differs = not isinstance(known.eager, str) and not all(entry.ok for entry in known.eager)
    if differs and captures.questions.hide():
        captures.forget()
        known = reference_of(job, steps=steps, fp32=fp32, listener=listener, captures=captures)
        told = " ".join(text for text in (known.eager_notice, captures.questions.line()) if text)
        known = replace(known, eager_notice=told)
    return known


def _run(job: Job, plan: Plan, steps: int, dtype: torch.dtype, captures: Captures) -> Record:
    """Ops that fail in float64 are tried in float32; an error of the user's is one there too."""
    tried: set[str] = set()
    while True:
        try:
            return run_serially(job, plan, steps, dtype, captures=captures)
        except StepError as error:
            if dtype != torch.float64 or error.op is None or error.op in WITHOUT_FLOAT64:
                WITHOUT_FLOAT64.difference_update(tried)
                raise
            tried.add(error.op)
            WITHOUT_FLOAT64.add(error.op)
            captures.forget()


def as_compared(job: Job, steps: int, fp32: bool) -> Job:
    """The job as it is run for a comparison."""
    job = replace(job.unmeasured(), steps=steps, epochs=None)
    return job if fp32 else replace(job, precision="fp32")


def _with_eager(known: Reference, tell: Listener) -> Reference:
    """One process against the user's own module and loss, run eagerly on the same samples.

    The graph is in float64 throughout; code that names dtypes, or asks for the precision of one, is not, and such code
    is compared in float32.
    """
    if known.captures.source.num_samples is None:
        return replace(known, eager="a stream is read once")
    if (
        known.job.precision == "fp8"
    ):  # the user's own code has no 8 bits: the same job without them is compared
        plain = reference_of(replace(known.job, precision="bf16"), steps=known.steps, fp32=True)
        return replace(
            known,
            eager=plain.eager,
            eager_notice=plain.eager_notice,
            draws=plain.draws,
            draws_notice=plain.draws_notice,
        )
    tell({"stage": f"the user's own code in a plain loop, {known.steps} steps"})
    drawn = list[list[Drawn]]()
    found = _against_eager(known, drawn)
    draws, finds = check_draws(drawn, known.job.seed)
    known = replace(known, draws=tuple(draws), draws_notice=finds)
    if known.dtype == torch.float32 or (not isinstance(found, str) and all(entry.ok for entry in found)):
        return replace(known, eager=found)
    tell({"stage": "the same in float32"})
    try:
        short = reference_of(known.job, steps=known.steps, fp32=True)
    except Exception:  # what is known is said
        return replace(known, eager=found)
    if isinstance(short.eager, str):
        return replace(known, eager=short.eager)
    why = (
        found if isinstance(found, str) else "names dtypes, or follows them, and is not in float64 throughout"
    )
    return replace(
        known, eager=short.eager, eager_notice=f"the user's own code {why}: compared with it in float32."
    )


def _against_eager(known: Reference, draws: list[list[Drawn]]) -> tuple[Difference, ...] | str:
    try:
        eager = run_eager(known.job, len(known.record.losses), known.dtype, known.captures, draws)
    except OtherChanceError as error:
        return (other_chance(error),)
    except NotReplayableError:
        return "its random numbers cannot be drawn in the same order"
    except Exception as error:
        return f"it fails in {str(known.dtype).removeprefix('torch.')}{told(error)}"
    return _differences(known, eager, replace(known.record, spread=None))


def differences_from(known: Reference, record: Record) -> tuple[Difference, ...]:
    """How far a plan's record is from the reference's."""
    return _differences(known, known.record, record)


def _differences(known: Reference, one: Record, other: Record) -> tuple[Difference, ...]:
    """What rounding does to single tensors is asked for where it matters."""

    def found(noise: Noise) -> tuple[Difference, ...]:
        return tuple(
            compare(
                one,
                other,
                rough=known.rough,
                tolerance=known.tolerance,
                weight_tolerance=known.weight_tolerance,
                noise=noise,
            )
        )

    plain = found(Noise())
    if not known.rough or all(difference.ok for difference in plain):
        return plain
    return found(_noise(known))


def _noise(known: Reference) -> Noise:
    """From the same job with less rounding: a tensor that is far from that is as far from other right answers."""
    job, source = replace(known.job, precision="fp32"), known.captures.source
    dtype = torch.float64 if known.job.precision == "fp32" else torch.float32
    one, captures = resolve("single", 1), Captures(job, source, dtype)
    try:
        exact = run_serially(job, one, known.steps, dtype, captures=captures)
    except Exception:  # it may be right in its own dtypes alone
        return Noise()
    return noise_of(known.record, exact)


def _self_difference(
    job: Job, plan: Plan, steps: int, reference: Record, dtype: torch.dtype, captures: Captures
) -> tuple[float, float]:
    """From what one process differs from itself when its batch is halved, which is noise: twice that of the first
    gradients, but no more than a fault would be; 10 times that of the weights."""
    doubled = min(job.accumulate * 2, job.batch)
    halved = run_serially(replace(job, accumulate=doubled), plan, steps, dtype, captures=captures)
    floor = norm(reference.weights.values()) * FP32_FLOOR
    worst = max(
        (relative(reference.weights[n], halved.weights[n], floor) for n in reference.weights), default=0.0
    )
    changes_the_model = worst > 1e-2  # batch statistics and random masks depend on the micro-batches
    ours, theirs = reference.gradients[0], halved.gradients[0]
    least = norm(ours.values()) * FP32
    off = max((relative(ours[n], theirs[n], least) for n in ours.keys() & theirs.keys()), default=0.0)
    return min(2 * off, _MOST_NOISE), _FP32_WEIGHT_LIMIT if changes_the_model else 10 * worst
