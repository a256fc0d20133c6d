"""Hold the captured step against the user's own code once, on the first micro-batch, before a run starts.

In: a job and its graphs. Out: one line that says how close they are, or why they were not compared; raises where the
two differ. It costs two steps of one process and nothing after.
"""

import os
from dataclasses import replace

import torch

from plait.errors import CaptureError, DataError
from plait.graph.capture.trace import CHANGES_ONCE
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.ops.replay import NotReplayableError, OtherChanceError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.order import micro_batch_sizes
from plait.job.origin import told
from plait.plan.named import resolve
from plait.run.prepare.programs import Programs
from plait.run.proof.compare import Difference, compare
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially
from plait.units import format_bytes

_TOLERANCE = 1e-3
"""In float32, of a gradient's largest value: other kernels differ by 1e-6, a lost op by far more."""
_ROUGH_TOLERANCE = 0.1
"""The same where numbers have 8 or 11 bits."""
_SHARE_OF_MEMORY = 0.25
"""Of what the machine has free."""


def check_capture(job: Job, programs: Programs) -> str | None:
    """What to tell of the comparison; None: there is nothing to compare."""
    source = programs.captures.source
    if programs.capture_error is not None or source.num_samples is None or programs.device.type != "cpu":
        return None
    size = micro_batch_sizes(min(job.batch, source.num_samples), job.accumulate)[0]
    graph = programs.captures.of_size(size)
    needed, free = _needed_bytes(graph), _free_bytes()
    if needed > free * _SHARE_OF_MEMORY:
        return f"capture not checked: it takes {format_bytes(needed)} of {format_bytes(free)} that are free."
    one = replace(
        job.unmeasured(), batch=size, accumulate=1, steps=1, epochs=None, clip_norm=None, clip_value=None, freeze=(),
        average=None,
    )  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1 if programs.plan.ranks > 1 else threads
    )  # a pool of threads does not survive a fork
    try:
        with kept_generators():
            found = _differences(one, programs)
    except OtherChanceError as error:
        raise CaptureError(
            f"the captured step is not what the model's own code computes: {error}.",
            fix="look for a probability that changes in Python, unseen by capture; --no-check runs it as captured.",
        ) from error
    except NotReplayableError:
        return "capture not checked: its random numbers cannot be drawn in the same order."
    except DataError:  # the run says which, where it comes to it
        return "capture not checked: a sample of the first step cannot be read."
    except Exception as error:
        return f"capture not checked: the model's own code fails{told(error)}"
    finally:
        torch.set_num_threads(threads)
    if found is None:
        return "capture not checked: gradients overflow float16 in the first step, which is skipped."
    wrong = [difference for difference in found if not difference.ok]
    if wrong:
        _refuse(wrong)
    largest = max((d.largest for d in found if d.kind == "gradient"), default=0.0)
    return f"capture checked: gradients equal eager's {f'to {largest:.0e}' if largest else 'bit for bit'}."


def _differences(job: Job, programs: Programs) -> list[Difference] | None:
    """None: the loss scale that a run begins with is too large, as it may well be."""
    captures = programs.captures
    if job.precision == "fp8":  # the model's own code has no 8 bits: the same job without them is compared
        job = replace(job, precision="bf16")
        captures = Captures(job, captures.source, captures.dtype)
    eager = run_eager(job, 1, captures.dtype, captures)
    rewritten = "on" if programs.compiler.rewrites else "off"  # what is checked is what runs
    single = resolve("single", 1, {"rewrite": rewritten})
    record = run_serially(job, single, 1, captures.dtype, captures=captures)
    if job.precision == "fp16" and not all(bool(g.isfinite().all()) for g in record.gradients[0].values()):
        return None
    short = any(g.dtype in (torch.bfloat16, torch.float16) for g in eager.gradients[0].values())
    tolerance = _ROUGH_TOLERANCE if short or job.precision != "fp32" else _TOLERANCE
    found = compare(eager, record, rough=True, tolerance=tolerance, weight_tolerance=tolerance)
    kinds = ("loss", "gradient", "buffer") if _counts_alike(captures, job) else ("loss", "gradient")
    return [difference for difference in found if difference.kind in kinds]


def _counts_alike(captures: Captures, job: Job) -> bool:
    """Whether buffers change as often as in eager: not where torch would run again what changes them, which is told."""
    return not any(CHANGES_ONCE in line for line in captures.of_size(job.batch).notices)


def _refuse(wrong: list[Difference]) -> None:
    """The backward goes from the last layer to the first: the last one that differs is where it begins."""
    gradients = [difference for difference in wrong if difference.kind == "gradient"]
    buffers = [difference for difference in wrong if difference.kind == "buffer"]
    first = gradients[-1] if gradients else (buffers or wrong)[0]
    name = first.name.removesuffix(" at step 1").removesuffix(" after 1 steps")
    module = name.rpartition(".")[0] or "the model itself"
    what = "the gradient of" if gradients else "the buffer"
    place = f"{what} {name}, in {module}," if gradients or buffers else "the loss"
    raise CaptureError(
        f"the captured step is not what the model's own code computes: {place} differs by {first.largest:.1e} of its "
        f"largest value ({len(gradients)} gradients differ).",
        fix="look for Python state or side effects there, which capture cannot see; --no-check runs it as captured.",
    )


def _needed_bytes(graph: Graph) -> int:
    """Parameters, gradients and activations of both sides, roughly: every value of the graph is alive."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return 2 * sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
