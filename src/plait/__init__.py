"""plait: one description of a training job, run in every way that a cluster allows."""

from importlib.metadata import version

from plait.errors import PlaitError
from plait.job.job import Job, Until
from plait.run.train import Result, train

__version__ = version("plait")
__all__ = ["Job", "PlaitError", "Result", "Until", "__version__", "train"]
