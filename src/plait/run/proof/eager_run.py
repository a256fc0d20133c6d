"""The user's own module and loss in a plain PyTorch loop, on the samples that a run has.

In: a job, graphs of it (for the numbers that it draws and the weights of its micro-batches). Out: a `Record` like those
of other runs. Nothing of what capture made of the model is run: only its random numbers are taken over.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.dynamic.counts import run_one_by_one
from plait.errors import CaptureError
from plait.graph.capture.autocast import autocast_like
from plait.graph.capture.stand_ins import stand_ins
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.graph.ops.draws import Drawn
from plait.graph.ops.random import random_key
from plait.graph.ops.replay import Replay
from plait.job.data.share import Share
from plait.job.generators import seed_torch, seeded_alike
from plait.job.job import Job
from plait.job.model.dtypes import default_dtype
from plait.job.model.watch import Watch
from plait.job.order import micro_batch_sizes
from plait.job.reading import total_and_weight
from plait.job.updates.clip import Clip
from plait.job.updates.follow import TRAIN_LOSS
from plait.plan.named import resolve
from plait.program.instructions import Opaque
from plait.run.eager.draws import SampleDraws
from plait.run.eager.step import seed_of, trained_alone
from plait.run.hold.state import ModelState
from plait.run.prepare.programs import Programs
from plait.run.proof.serial_run import Record
from plait.torch_private.intercept import intercepted
from plait.torch_private.wrappers import in_parts


def run_eager(
    job: Job, steps: int, dtype: torch.dtype, captures: Captures, draws: list[list[Drawn]] | None = None
) -> Record:
    """Train for `steps` steps in the way that people write it; raises NotReplayableError.

    `draws` is given what the first micro-batch draws, forward and backward; of several objectives, that of each turn.
    """
    job = job.in_steps(captures.source.num_samples)
    one, device = resolve("single", 1), torch.device("cpu")
    programs = (
        Programs.several(job, captures.source, one, device, dtype)
        if job.objectives
        else Programs(job, captures.source, one, device, dtype, captures)
    )
    state = ModelState(job, torch.device("cpu"), dtype)
    state.narrow = bool(captures.narrow)
    run_one_by_one(state.model)
    if dtype == torch.float64:
        _keep_eps(state.model)
    order = job.order(captures.source.num_samples)
    assert order is not None, "a stream has no order of its own"
    losses, norms, gradients = [], [], []
    watch = Watch({"factory": job.model, "loss": job.loss, "objective": job.objective})
    try:
        for step in range(steps):
            ids = order.at(step).ids
            sizes = micro_batch_sizes(len(ids), job.accumulate)
            batches = [captures.source.fetch(part) for part in torch.split(ids, list(sizes))]
            seen = None
            if draws is not None and len(draws) < max(1, sum(entry.repeat for entry in job.objectives)):
                draws.append([])
                seen = draws[-1].append
            losses.append(_gradients(state, programs.at(step), batches, sizes, step, dtype, seen))
            frozen = state.frozen(step)
            for name, parameter in state.named:
                parameter.grad = None if name in frozen else parameter.grad
            part = state.part(step)
            norms += _clip(Clip.of(part.clip_norm, part.clip_value), state.named)
            gradients.append(
                {n: p.grad.to_dense().detach().clone() for n, p in state.named if p.grad is not None}
            )
            state.update(step)
            state.observe({TRAIN_LOSS: losses[-1]})
    finally:
        watch.restore()
    return Record(
        losses=tuple(losses),
        norms=tuple(norms) or None,
        gradients=tuple(gradients),
        weights=in_parts({name: parameter.detach() for name, parameter in state.parameters.items()}),
        buffers=dict(state.model.named_buffers()),
        spread=None,
        notices=(),
    )


def _keep_eps(model: nn.Module) -> None:
    """Let norms that take the smallest number of a dtype take that of the model's own, as its graph does."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(torch.float32).eps


def _clip(clip: Clip, named: Sequence[tuple[str, nn.Parameter]]) -> list[float]:
    """With torch's own functions; the norm of all that was clipped by norms, where anything was."""
    norms = []
    for position, (_, norm) in enumerate(clip.norms):
        own = [p for name, p in named if clip.norm_of(name) == position]
        norms.append(float(nn.utils.clip_grad_norm_(own, norm)))
    for name, parameter in named:
        if (value := clip.value_of(name)) is not None and parameter.grad is not None:
            nn.utils.clip_grad_value_([parameter], value)
    return [math.hypot(*norms)] if norms else []


def _gradients(
    state: ModelState,
    programs: Programs,
    batches: list[Any],
    sizes: tuple[int, ...],
    step: int,
    dtype: torch.dtype,
    seen: Callable[[Drawn], None] | None,
) -> float:
    """One step's gradients into the parameters; returns the loss of the whole batch."""
    state.optimizer.zero_grad(set_to_none=True)
    job, trained = state.part(step), state.trained_in(step)
    graphs = [_graph_of(programs.captures, batch, size) for batch, size in zip(batches, sizes, strict=True)]
    nodes = [_nodes_of(programs, batch, size) for batch, size in zip(batches, sizes, strict=True)]
    placed = [state.placed(batch) for batch in batches]
    known = [weight_of(graph, batch) for graph, batch in zip(graphs, placed, strict=True)]
    loss, whole = 0.0, 0.0
    kept: list[Tensor | None] = [None] * len(state.named)
    for number, (own, batch, size, early) in enumerate(zip(nodes, placed, sizes, known, strict=True)):
        with (
            trained_alone(state.named, trained),
            drawing(
                state, own, step, number, size, dtype, programs.captures.device_type, None if number else seen
            ),
        ):
            result = job.objective_of(state.model, batch)
            fixed, by_samples = (own.fixed, own.by_samples) if isinstance(own, Opaque) else (None, False)
            total, counted = total_and_weight(job, batch, size, result, fixed=fixed, by_samples=by_samples)
            mean = result if isinstance(result, Tensor) else total / counted
            weight = early if early is not None else float(counted)
            if mean.requires_grad and weight > 0:
                mean.backward()  # type: ignore[no-untyped-call]
        loss, whole = loss + float(mean.detach()) * weight, whole + weight
        if len(sizes) > 1:
            kept = [_plus(old, p.grad, weight) for old, (_, p) in zip(kept, state.named, strict=True)]
            state.optimizer.zero_grad(set_to_none=True)
    if len(sizes) > 1:
        for (_, parameter), gradient in zip(state.named, kept, strict=True):
            parameter.grad = gradient / whole if gradient is not None else None
    return loss / whole if whole else float("nan")


def _plus(old: Tensor | None, gradient: Tensor | None, weight: float) -> Tensor | None:
    if gradient is None:
        return old
    return gradient * weight if old is None else old + gradient * weight


def _graph_of(captures: Captures, batch: Any, size: int) -> Graph | None:
    try:
        return captures.of_batch(batch, size)
    except CaptureError:
        return None


def _nodes_of(programs: Programs, batch: Any, size: int) -> list[fx.Node] | Opaque:
    """What one process runs: its random ops know which dims hold samples."""
    share = Share(batch=batch, ids=tuple(range(size)), sizes=(size,), offset=0, global_offset=0)
    (own,) = programs.for_step([share]).classes
    if own.sized is not None:  # its nodes are those of another shape
        shapes = (programs.captures.extents(batch),)
        (own,) = programs.compiler.compile((share.sizes,), shapes, varies=True).classes
    opaque = next((entry for entry in own.instructions if isinstance(entry, Opaque)), None)
    if opaque is not None:
        return opaque
    return [node for segment in own.segments.values() for node in segment.nodes]


@contextmanager
def drawing(
    state: ModelState,
    runs: Sequence[fx.Node] | Opaque,
    step: int,
    micro_batch: int,
    num_samples: int,
    dtype: torch.dtype,
    device_type: str,
    seen: Callable[[Drawn], None] | None = None,
) -> Iterator[None]:
    """Eager code as a run has it: its precision, its random numbers, float64 where a run is in float64.

    `seen` is told of every draw.
    """
    job = state.part(step)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        seed_torch(seed_of(job, step, micro_batch))
        stack.enter_context(seeded_alike(seed_of(job, step, micro_batch)))
        stack.enter_context(autocast_like(job, device_type))
        key = random_key(seed=job.seed, step=step, micro_batch=micro_batch)
        if isinstance(runs, Opaque) and runs.watched:
            draws = SampleDraws(key, num_samples, state.model, runs.draws, told=seen)
            stack.enter_context(intercepted(draws.takers()))
        replay = None if isinstance(runs, Opaque) else Replay(runs, key, seen)
        if replay is not None and (takers := replay.takers()):  # what is checkpointed would draw twice
            stack.enter_context(stand_ins())
            stack.enter_context(intercepted(takers))
        stack.enter_context(default_dtype(dtype))
        yield
        if replay is not None:
            replay.finish()


def weight_of(graph: Graph | None, batch: Any) -> float | None:
    """The weight of a micro-batch as the graph reads it, where it depends on the batch alone."""
    if graph is None or not graph.weight_is_early:
        return None
    if graph.static_weight is not None:
        return graph.static_weight
    held = dict(zip([e.node for e in graph.inputs_of("batch")], graph.batch.tensors(batch), strict=True))
    values: dict[fx.Node, Any] = {}
    needed, stack = set[fx.Node](), [graph.nodes()[graph.weight]]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    for node in graph.graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            values[node] = held[node.name]
        elif node.op == "get_attr":
            values[node] = node.meta["constant"]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return float(values[graph.nodes()[graph.weight]])
