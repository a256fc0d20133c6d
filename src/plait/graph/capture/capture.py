"""Capture: a job's model and loss become one flat, functional graph of forward and backward.

In: a job, the shapes of a global micro-batch. Out: a `Graph`. Everything happens on fake CPU tensors: nothing is
allocated, nothing is computed. A model that cannot be captured raises `CaptureError` with the user's own file and line.

The way: trace forward, loss and backward of the user's own code (attention and batch norm as ops of our own, the loss
read as (total, weight)), make the graph functional, and make random numbers counter-based.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from plait.errors import CaptureError, JobError
from plait.graph.capture.branches import Decisions, explore
from plait.graph.capture.islands import Islands, may_be_absent
from plait.graph.capture.merge import merge
from plait.graph.capture.questions import Questions
from plait.graph.capture.refusal import (
    explain,
    refuse_late_hooks,
    refuse_other_shape,
    refuse_other_values,
    refuse_resized,
    refuse_resizing,
    refuse_sparse_gradients,
)
from plait.graph.capture.steady import trace_steady
from plait.graph.capture.trace import Subject, Traced
from plait.graph.graph import BatchLayout, Graph, Input, depends_on
from plait.graph.rewrite.clean import clean
from plait.graph.rewrite.functional import functionalize, mutates
from plait.graph.rewrite.marks import settle
from plait.graph.rewrite.new_nodes import call
from plait.graph.rewrite.random_ops import rewrite_random
from plait.graph.rewrite.shared_statistics import part_shared_statistics
from plait.graph.rewrite.strides import pin_strides
from plait.graph.storage import users_through_views
from plait.job.batch import Objects
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.job.model.dtypes import scalar_dtype
from plait.job.objective import refuse_no_gradient
from plait.job.origin import RAISED
from plait.torch_private.fake import FakeTensor, FakeTensorMode

LeafShapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Sizes = tuple[int, LeafShapes]
"""How many samples, and the shapes of the tensors that they are."""


def capture(
    job: Job,
    layout: BatchLayout,
    constants: Sequence[Any],
    shapes: LeafShapes,
    num_samples: int,
    device_type: str = "cpu",
    islands: Islands | None = None,
    others: Sequence[Sizes] = (),
    questions: Questions | None = None,
) -> Graph:
    """Capture one micro-step of `job` on a micro-batch of `num_samples` samples.

    `constants` are the leaves of a batch that are not tensors (any value at the tensors' places).
    `device_type` is what the step will run on; it is captured on tensors of processors all the same. `islands`: modules
    that earlier captures found to need eager runs. `others`: what else was captured of the job, whose steps may come
    before this one and after it. `questions`: what it is told where it asks whether it is traced.
    """
    if any(isinstance(value, Objects) for value in constants):
        raise CaptureError(
            "the batch holds text or objects (strings, trees, graphs): what is computed differs from sample to sample.",
            fix="use a plan that runs models as they are (single, ddp, zero1-3, servers, averages), or let `collate` "
            "make tensors of them.",
        )
    own = islands if islands is not None else Islands(job)
    told = questions if questions is not None else Questions()
    real = False
    while True:
        try:
            return _capture(job, layout, constants, shapes, num_samples, device_type, own, real, others, told)
        except _NoValueError as error:
            if real:
                raise CaptureError(
                    str(error), fix="make it in the forward, or keep it in a buffer."
                ) from error
            real = True
        except CaptureError as error:
            if (found := own.grow(error)) is not None:
                raise found from error


def _capture(
    job: Job,
    layout: BatchLayout,
    constants: Sequence[Any],
    shapes: LeafShapes,
    num_samples: int,
    device_type: str,
    islands: Islands,
    real: bool,
    others: Sequence[Sizes],
    questions: Questions,
) -> Graph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(job, mode, real)
    model.train()
    for buffer in model.buffers():
        buffer.constant = None  # type: ignore[attr-defined]  # its value changes: Python must not read it
    with mode:
        leaves = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
    subject = Subject(
        job=job,
        model=model,
        parameters=dict(model.named_parameters()),
        buffers=dict(model.named_buffers()),
        aliases=tied_names(model),
        layout=layout,
        constants=constants,
        leaves=leaves,
        num_samples=num_samples,
        scalars=scalar_dtype(model.parameters(), torch.float32),
        device_type=device_type,
        islands=islands,
        questions=questions,
    )

    def of_sizes(sizes: Sizes) -> Subject:
        with mode:
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in sizes[1]]
        return replace(subject, leaves=tensors, num_samples=sizes[0])

    def one_way(decisions: Decisions) -> Graph:
        traced = trace_steady(subject, mode, decisions, [partial(of_sizes, sizes) for sizes in others])
        refuse_resized(traced.module.graph)
        module = functionalize(traced.module, mode) if mutates(traced.module.graph) else traced.module
        return _assemble(subject, traced, module)

    islands.begin(model)
    anomalies = torch.is_anomaly_enabled()
    try:
        refuse_late_hooks(model)
        with torch.autograd.set_detect_anomaly(False):  # it reads every gradient's values, and here are none
            graph = merge(explore(one_way))
        if anomalies:
            graph = replace(graph, notices=(*graph.notices, _ANOMALIES))
        if not graph.gradients:
            refuse_no_gradient(len(subject.trainable))
        return graph
    except (JobError, CaptureError, _NoValueError):
        raise
    except RAISED as error:
        raise explain(error) from error


_ANOMALIES = (
    "anomaly mode is on: a captured step does not look for NaN by it; --detect-nan does, and names the line, the "
    "module and the samples."
)


class _NoValueError(Exception):
    """A step uses a tensor that was made without values, and is neither a parameter nor a buffer."""


def fake_model(job: Job, mode: FakeTensorMode, real: bool = False) -> nn.Module:
    """The job's model with fake parameters; built for real only where its constructor needs values, or with `real`.

    What it holds besides parameters and buffers has values then.
    """
    job = job if job.weights is None else replace(job, weights=None)  # whose values nobody asks for here
    if real or isinstance(job.model, nn.Module):
        model = job.build_model()
    else:
        try:
            with mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return job.build_model()
        except Exception as error:
            if isinstance(error, JobError) and error.__cause__ is None:
                raise
            # a constructor that reads values (.item(), .tolist()) cannot run on fake tensors
            model = job.build_model()
    return as_fake(model, mode)


def as_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy with fake tensors; the memo keeps tied parameters tied, and the user's module is not touched."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach(), static_shapes=True)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach(), static_shapes=True)
    return copy_of(model, memo)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names that share a parameter with an earlier name, mapped to that name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def _assemble(subject: Subject, traced: Traced, module: fx.GraphModule) -> Graph:
    graph = module.graph
    parameters, buffers = list(subject.parameters), list(subject.buffers)
    new_buffers = _take_writes(graph, [*parameters, *buffers])
    output = next(node for node in graph.nodes if node.op == "output")
    total, weight, *gradients = output.args[0]
    gradients, flags = gradients[: len(traced.reached)], gradients[len(traced.reached) :]
    _keep_for_backward(graph, [name in new_buffers for name in (*parameters, *buffers)])
    refuse_sparse_gradients(dict(zip(traced.reached, gradients, strict=True)))
    output.args = ((total, weight, *new_buffers.values(), *gradients, *flags),)
    clean(module)
    refuse_other_values(graph)
    refuse_resizing(graph)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(node.meta["constant"], FakeTensor):
            shape = tuple(node.meta["constant"].shape)
            raise _NoValueError(
                f"the step uses a tensor of shape {shape} that an earlier one made without values."
            )
    part_shared_statistics(graph)
    pin_strides(graph)
    settle(graph)
    key = [node for node in graph.nodes if node.op == "placeholder"][-2]
    _make_random_numbers_ours(graph, key)
    graph.eliminate_dead_code()
    kinds = [
        *(("parameter", name) for name in parameters),
        *(("buffer", name) for name in buffers),
        *(("batch", f"batch.{i}") for i in range(sum(subject.layout.is_tensor))),
        ("key", "key"),
        ("tangent", "tangent"),
    ]
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    trainable = subject.trainable
    total, weight, *rest = output.args[0]
    written, found = rest[: len(new_buffers)], rest[len(new_buffers) : len(rest) - len(flags)]
    asked = rest[len(rest) - len(flags) :]
    return Graph(
        graph=graph,
        inputs=tuple(
            Input(kind=kind, name=name, node=node, trainable=name in set(trainable) and kind == "parameter")  # type: ignore[arg-type]
            for (kind, name), node in zip(kinds, names, strict=True)
        ),
        batch=subject.layout,
        num_samples=subject.num_samples,
        total=total.name,
        weight=weight.name,
        weight_is_early=not depends_on(weight, {*names[: len(parameters)], names[-1], names[-2]}),
        static_weight=traced.static_weight,
        gradients={name: node.name for name, node in zip(traced.reached, found, strict=True)},
        new_buffers={name: node.name for name, node in zip(new_buffers, written, strict=True)},
        aliases=subject.aliases,
        unused=tuple(name for name in trainable if name not in traced.reached),
        conditional=frozenset(n for n, g in zip(traced.reached, found, strict=True) if may_be_absent(g)),
        flags=tuple(node.name for node in asked),
        notices=traced.notices,
        precision=subject.job.precision,
        model=type(subject.model).__name__,
    )


def _make_random_numbers_ours(graph: fx.Graph, key: fx.Node) -> None:
    outcome = rewrite_random(graph, key)
    if outcome.unsupported:
        raise CaptureError(
            f"the model draws random numbers with {', '.join(sorted(set(outcome.unsupported)))}, "
            "which would depend on how the batch is split.",
            fix="use rand, randn, dropout or bernoulli to have it captured; plans single and ddp run it eagerly.",
        )


def _keep_for_backward(graph: fx.Graph, changes: list[bool]) -> None:
    """Read a copy of what gets a new value where the backward needs the old one, as it may run after the change."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node, changed in zip(placeholders, changes, strict=False):
        if changed and any(user.meta["phase"] == "backward" for user in users_through_views(node)):
            with graph.inserting_after(placeholders[-1]):
                kept = call(graph, torch.ops.aten.clone.default, (node,), next(iter(node.users)))
            kept.meta["phase"] = "forward"
            node.replace_all_uses_with(kept)
            kept.args = (node,)


def _take_writes(graph: fx.Graph, held: list[str]) -> dict[str, fx.Node]:
    """Remove the trailing `copy_` into what the model holds, and into the batch, which nobody reads again.

    Returns what would have been written to parameters and buffers, by name.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    name_of = dict(zip(placeholders, held, strict=False))
    written: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            target, value = node.args[0], node.args[1]
            if target in name_of:
                refuse_other_shape(name_of[target], target, value)
                written[name_of[target]] = value
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return written
