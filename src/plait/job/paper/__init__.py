"""Models on paper: real modules described by a few numbers, to be planned for without their data or weights.

In: `gpt3-175b`, `gpt:layers=96,hidden=12288,heads=96`, or a shape. Out: a `Job` on random samples, which can be
captured, predicted, planned and, where it fits, run. Nothing is built before somebody asks the job for its model.

    shapes.py      the numbers, the known models by name, and their text form
    gpt.py, llama.py, bert.py, images.py     the modules; attention.py is what the transformers share
    samples.py     random data of the right shape
    job.py         the Job
"""

from plait.job.paper.job import paper_job
from plait.job.paper.shapes import KNOWN, ImageShape, Shape, TransformerShape, read_shape

__all__ = ["KNOWN", "ImageShape", "Shape", "TransformerShape", "paper_job", "read_shape"]
