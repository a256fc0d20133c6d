"""WHAT is trained: the Job, the order of its samples, and their loading.

Goes in: the user's network, data, loss and optimizer, in plain PyTorch. Comes out: a checked `Job`, the
learning rate of every step, and each rank's share of every micro-batch. Never here: graphs, plans, devices,
processes.

    job.py        Job, Until: the description itself, checked where it is made
    checks.py     contradictions between the job, its data and the number of ranks
    reference.py  `path.py:function` or `module:function` -> Job
    arguments.py  what that function is called with
    schedule.py   the learning rate of optimizer step k
    order.py      which samples are in step k, and how a step is split
    data.py       datasets, tensors, streams -> Source (columns.py, parquet.py, huggingface.py: one kind each)
    loader.py     a Source read ahead in the background
    batch.py      the tensors inside a batch, and words for what was found instead
"""

from plait.job.batch import map_tensors, tensors_in
from plait.job.checks import problems
from plait.job.data.loader import Loader
from plait.job.data.open import Source, open_data
from plait.job.data.share import LoadedStep, Share
from plait.job.job import Job, Until
from plait.job.named.reference import load_job
from plait.job.order import SampleOrder, StepSamples, micro_batch_sizes, shares, split
from plait.job.schedule import Schedule

__all__ = [
    "Job",
    "LoadedStep",
    "Loader",
    "SampleOrder",
    "Schedule",
    "Share",
    "Source",
    "StepSamples",
    "Until",
    "load_job",
    "map_tensors",
    "micro_batch_sizes",
    "open_data",
    "problems",
    "shares",
    "split",
    "tensors_in",
]
