"""Statistics of batch norm that fit averaged weights: as `torch.optim.swa_utils.update_bn` makes them.

In: a model that shows its averaged weights, and some batches of its data. Out: the means of the batches' statistics, in
the buffers of its batch norm layers, the same on every rank. Batches do not depend on each other, so each rank takes
some of them, whole. No other buffer is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plait.job.data.loader import Loader
from plait.job.data.share import Share
from plait.job.data.source import Source
from plait.job.model.dtypes import default_dtype
from plait.run.eager.step import seeded
from plait.run.hold.state import ModelState
from plait.torch_private.modules import BatchNorm


@torch.no_grad()
def fit_batch_norm(
    state: ModelState, source: Source, steps: int, rank: int, ranks: int, add_up: Callable[[Tensor], Tensor]
) -> None:
    """Let the model see the micro-batches of the job's first `steps` steps; `add_up` sums over all ranks."""
    layers = [layer for layer in state.model.modules() if isinstance(layer, BatchNorm)]
    tracked = [layer for layer in layers if layer.running_mean is not None]
    if not tracked:
        return
    job, count = state.job, 0
    with _as_they_were(state, tracked), Loader(
        source=source, order=job.order(source.num_samples), batch=job.batch, accumulate=job.accumulate,
        places=((step, 0) for step in range(rank, steps, ranks)), depth=1,
        draws=job.draws,
    ) as loader:  # fmt: skip
        for layer in tracked:
            layer.reset_running_stats()
            layer.momentum = None  # the mean of all batches
        for loaded in loader:
            for number, share in enumerate(loaded.micro_batches):
                if len(share.ids):
                    _see(state, share, loaded.step, number)
                    count += 1
        seen = [t for layer in tracked for t in (layer.running_mean, layer.running_var) if t is not None]
        own = [tensor.detach().double().reshape(-1).cpu() * count for tensor in seen]
        counted = torch.tensor([count], dtype=torch.float64)
        *sums, total = torch.split(add_up(torch.cat([*own, counted])), [*map(len, own), 1])
    for tensor, found in zip(seen, sums, strict=True):
        tensor.copy_((found / total).view(tensor.shape))
    for layer in tracked:
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(int(total))


def _see(state: ModelState, share: Share, step: int, micro_batch: int) -> None:
    """A forward pass in training; an objective may differentiate inside."""
    job, batch = state.part(step), state.placed(share.batch)
    with (
        torch.set_grad_enabled(job.objective is not None),
        seeded(state, step, micro_batch),
        job.autocast(state.device.type),
        default_dtype(state.asked),
    ):
        job.objective_of(state.model, batch)


@contextmanager
def _as_they_were(state: ModelState, layers: list[BatchNorm]) -> Iterator[None]:
    """The model in training, and after it all that is not a statistic of these layers as before."""
    own = {id(b) for layer in layers for b in layer.buffers(recurse=False)}
    others = [(b, b.clone()) for b in state.model.buffers() if id(b) not in own]
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in state.model.modules()]
    momenta = [layer.momentum for layer in layers]
    state.model.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for buffer, value in others:
            buffer.copy_(value)
