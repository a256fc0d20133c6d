"""The network of a job, as its training begins with it.

In: a job. Out: its network, built under its seed, with the weights and the precision that it asks for; or the reason
why it cannot be trained. A network that the job was given is never changed, but for shapes that it did not have.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.errors import JobError
from plait.job.batch import describe
from plait.job.lazy import give_shapes, lacks_shapes
from plait.job.model.copies import copy_of
from plait.job.model.weights import load_weights
from plait.job.origin import called
from plait.job.precision import with_short_weights
from plait.job.updates.patterns import as_patterns, check_known, first_of


def build_model(job: Any) -> nn.Module:
    """The network: built under the job's seed, or the given instance as it is."""
    job.seed_everything()
    model = job.model if isinstance(job.model, nn.Module) else _called(job.model)
    if lacks_shapes(model):
        give_shapes(model, job)  # a given instance too: torch cannot copy what has no shape
    _refuse_sparse(model)
    changes = job.weights is not None or job.trains is not None or job.precision == "bf16-weights"
    if changes and model is job.model:
        model = copy_of(model)
    if job.weights is not None:
        load_weights(model, Path(job.weights))
    if job.trains is not None:
        _choose_trained(model, as_patterns(job.trains))
    if job.precision == "bf16-weights":
        model = with_short_weights(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        num_frozen = sum(1 for _ in model.parameters())
        raise JobError(
            f"{type(model).__name__} has no trainable parameter ({num_frozen} frozen ones).",
            fix="give the network a layer with weights, or set requires_grad=True on those to be trained.",
        )
    return model


def _called(make: Any) -> nn.Module:
    with called("model()", fix="give a function without arguments that returns the network."):
        model = make()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model() returned {describe(model)}, not a torch.nn.Module.", fix="return the network."
        )
    return model


def _choose_trained(model: nn.Module, patterns: tuple[str, ...]) -> None:
    named = list(model.named_parameters())
    check_known("trains", patterns, [name for name, _ in named])
    for name, parameter in named:
        if first_of(patterns, name) is None:
            parameter.requires_grad_(False)


def _refuse_sparse(model: nn.Module) -> None:
    """What a model holds is copied, sent and saved as dense numbers."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            raise JobError(
                f"{name} of {type(model).__name__} is not dense ({str(tensor.layout).removeprefix('torch.')}).",
                fix="keep its indices and values as two buffers, and make the sparse tensor in the forward.",
            )
