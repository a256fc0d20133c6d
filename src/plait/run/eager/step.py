"""Models that cannot be captured: their forward and backward run eagerly, as one opaque instruction.

In: a rank's share of a micro-batch. Out: (total, weight, gradients of total, buffers weighted by the share), all of
them summands over ranks. What one process would compute of the whole micro-batch: the loss weighs what it is a mean of,
batch norm knows the samples of all ranks, random numbers belong to samples, and hooks on activations see gradients of
the mean over all. What remains is told: Python state, branches and other sums over the batch are those of a share.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from plait.errors import JobError
from plait.graph.ops.random import random_key
from plait.job.data.share import Share
from plait.job.generators import seed_torch, seeded_alike
from plait.job.job import Job
from plait.job.model.dtypes import default_dtype
from plait.job.objective import refuse_own_gradients
from plait.job.reading import total_and_weight
from plait.program.instructions import Opaque
from plait.run.eager.company import Company
from plait.run.eager.draws import SampleDraws
from plait.run.eager.statistics import WholeStatistics
from plait.run.hold.state import ModelState
from plait.torch_private.intercept import Takers, intercepted


def run_eagerly(
    state: ModelState,
    share: Share,
    model: Opaque,
    step: int,
    micro_batch: int,
    company: Company | None,
) -> tuple[list[Tensor], frozenset[str]]:
    """([total, weight, *gradients, *buffers] of one share, parameters that had a gradient on any rank).

    An empty share contributes zeros. `company`: the other ranks of `data`, where there are any.
    """
    named = dict(state.model.named_parameters())
    tensors = [named[name] for name in model.parameters]
    zero = torch.zeros((), dtype=state.dtype, device=state.device)
    found: list[Tensor | None] = [None] * len(tensors)
    total, weight, whole = zero, zero.clone(), 1.0
    if len(share.ids) == 0:
        if company is not None:
            company.leave()
    else:
        takers = _takers(state, share, model, step, micro_batch, company)
        batch = state.placed(share.batch)
        trained = set(model.parameters)
        frozen = [(name, p) for name, p in named.items() if not p.requires_grad and name not in trained]
        job = state.part(step)
        with (
            torch.enable_grad(),
            seeded(state, step, micro_batch),
            trained_alone(list(named.items()), trained - state.frozen(step)),
            without_gradients(list(named.values())),
        ):
            with state.job.autocast(state.device.type), default_dtype(state.asked), intercepted(takers):
                result = job.objective_of(state.model, batch)
            total, weight = total_and_weight(
                job, batch, len(share.ids), result, sum(share.sizes), model.fixed, model.by_samples
            )
            _refuse_late_training(frozen)
            refuse_own_gradients(named)
            whole = float(weight)
            if company is not None:
                whole = float(company.gather("weight", weight.detach().double().reshape(1)).sum())
            if whole > 0:  # a share that weighs nothing has samples in the statistics of others
                alone = company is None and isinstance(result, Tensor)
                mean = result if alone else total / whole
                with intercepted(takers):
                    found = _backward(mean, tensors)  # type: ignore[arg-type]
        if company is not None:
            company.leave()
    used = torch.tensor([gradient is not None for gradient in found], dtype=torch.float64)
    if company is not None:
        used = company.gather("used", used).sum(0)
    names = frozenset(name for name, is_used in zip(model.parameters, used.tolist(), strict=True) if is_used)
    gradients = [torch.zeros_like(t) if g is None else g * whole for t, g in zip(tensors, found, strict=True)]
    return [total.detach(), weight.detach(), *gradients, *_buffers(state, model.buffers, share)], names


@contextmanager
def trained_alone(named: Sequence[tuple[str, nn.Parameter]], names: Collection[str]) -> Iterator[None]:
    """What is frozen, or trained by another objective, needs no gradient now."""
    others = [p for name, p in named if p.requires_grad and name not in names]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextmanager
def without_gradients(tensors: Sequence[nn.Parameter]) -> Iterator[None]:
    """What parameters have for a gradient begins with this step, and is as before when it ends."""
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in zip(tensors, before, strict=True):
            tensor.grad = gradient


def _takers(
    state: ModelState, share: Share, model: Opaque, step: int, micro_batch: int, company: Company | None
) -> Takers:
    """Which ops of the user's code are ours: random numbers by sample, statistics of all ranks."""
    if not model.watched:
        return ()
    key = random_key(seed=state.job.seed, step=step, micro_batch=micro_batch, first_sample=share.offset)
    takers = SampleDraws(key, len(share.ids), state.model, model.draws, company).takers()
    if company is not None and state.job.batch_norm == "global":
        takers += WholeStatistics(company, state.model).takers()
    return takers


@contextmanager
def seeded(state: ModelState, step: int, micro_batch: int) -> Iterator[None]:
    """What torch, Python and numpy draw belongs to a micro-batch, and leaves no trace."""
    seed, devices = (
        seed_of(state.job, step, micro_batch),
        [state.device] if state.device.type == "cuda" else [],
    )
    with torch.random.fork_rng(devices=devices), seeded_alike(seed):
        seed_torch(seed)
        yield


def seed_of(job: Job, step: int, micro_batch: int) -> int:
    """Of torch's generator, for a micro-batch."""
    return ((job.seed * 1_000_003 + step) * 1_000_003 + micro_batch * 65_537) % (1 << 63)


def _backward(loss: Tensor, tensors: list[nn.Parameter]) -> list[Tensor | None]:
    """The gradients as `loss.backward()` leaves them, whatever hooks of the user's do to them on the way."""
    if loss.requires_grad:
        torch.autograd.backward(loss)  # not `loss.backward`, within which no mode sees what is computed again
    return [tensor.grad for tensor in tensors]


def _refuse_late_training(frozen: list[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise JobError(
                f"the forward set requires_grad of {name}, which was frozen when the model was built: the optimizer "
                "does not know it.",
                fix="build it with requires_grad=True, "
                "and let the job say until when it is frozen: freeze=[Freeze(parameters=..., until=...)].",
            )


def _buffers(state: ModelState, names: tuple[str, ...], share: Share) -> list[Tensor]:
    """Summands of the ranks' buffers: their mean by samples; counters are those of the first rank that has samples."""
    fraction = len(share.ids) / sum(share.sizes)
    leads = 1.0 if len(share.ids) > 0 and share.offset == 0 else 0.0
    found = []
    for buffer in (state.buffers[name].detach() for name in names):
        if buffer.is_complex():
            found.append(buffer.to(torch.complex128) * fraction)
        elif buffer.is_floating_point():  # in float64 the shares of what nobody changes add up to it exactly
            wide = buffer.double()
            found.append(torch.where(torch.isfinite(wide), wide * fraction, wide))
        else:
            found.append(buffer.double() * leads)
    return found
