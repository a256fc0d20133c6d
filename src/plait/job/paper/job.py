"""The Job of a model on paper.

In: a shape or its text, and the batch. Out: a Job with AdamW (transformers) or SGD with momentum (image networks).
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.job import Job
from plait.job.paper.bert import Bert
from plait.job.paper.gpt import GPT
from plait.job.paper.images import AlexNet, ResNet
from plait.job.paper.llama import Llama
from plait.job.paper.samples import ImageSamples, TokenSamples
from plait.job.paper.shapes import ImageShape, Shape, TransformerShape, read_shape

DEFAULT_BATCH = 32
"""Samples a step where nobody says."""
_STEPS_OF_DATA = 10
"""A model on paper is never trained: enough for a step of every kind."""


def paper_job(
    model: str | Shape, *, batch: int = DEFAULT_BATCH, accumulate: int = 1, steps: int = _STEPS_OF_DATA
) -> Job:
    """A job that trains this model on random samples."""
    shape = read_shape(model) if isinstance(model, str) else model
    is_image = isinstance(shape, ImageShape)
    return Job(
        model=partial(build, shape),
        data=partial(samples, shape, batch * steps),
        loss=F.cross_entropy if is_image else word_loss,
        optimizer=momentum if is_image else adamw,
        batch=batch,
        steps=steps,
        accumulate=accumulate,
        precision=shape.precision,
    )


def build(shape: Shape) -> nn.Module:
    """The module of a shape."""
    if isinstance(shape, ImageShape):
        return ResNet(shape) if shape.family == "resnet" else AlexNet(shape)
    families = {"gpt": GPT, "bert": Bert, "llama": Llama}
    return families[shape.family](shape)


def samples(shape: Shape, num_samples: int) -> TokenSamples | ImageSamples:
    """Random data of a shape."""
    if isinstance(shape, TransformerShape):
        return TokenSamples(shape, num_samples)
    return ImageSamples(shape, num_samples)


def word_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the positions that have a target."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As language models are trained."""
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As image networks are trained."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)
