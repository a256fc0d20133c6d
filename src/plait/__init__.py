"""plait: one description of a training job, run in every way that a cluster allows."""

from importlib import metadata as _metadata

from plait.errors import PlaitError
from plait.job.job import Job, Until
from plait.options import Limits, Saving, Trial
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.parallelize import Step, parallelize
from plait.run.proof.verify import Verification, verify
from plait.run.train import Result, train

__version__ = _metadata.version("plait")
__all__ = [
    "Job",
    "Limits",
    "PlaitError",
    "Plan",
    "Result",
    "Saving",
    "Step",
    "Trial",
    "Until",
    "Verification",
    "__version__",
    "parallelize",
    "resolve",
    "train",
    "verify",
]
