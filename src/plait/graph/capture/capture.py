"""Capture: a job's model and loss become one flat, functional graph of forward and backward.

In: a job, the shapes of a global micro-batch. Out: a `Graph`. Everything happens on fake CPU tensors: nothing is
allocated, nothing is computed. A model that cannot be captured raises `CaptureError` with the user's own file and line.

The way: trace the forward (attention and batch norm as ops of our own), make it functional, read the loss as
(total, weight), make random numbers counter-based, then differentiate the aten graph by tracing its interpretation.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from plait.errors import CaptureError, JobError
from plait.graph.capture.differentiate import differentiate
from plait.graph.capture.functional import functionalize, mutates
from plait.graph.capture.functions import FunctionCapture
from plait.graph.capture.loss import as_total_and_weight
from plait.graph.capture.marks import Marks
from plait.graph.capture.random_rewrite import rewrite_random
from plait.graph.capture.refusal import explain, refuse_custom_functions, refuse_sparse_gradients
from plait.graph.graph import BatchLayout, Graph, Input
from plait.job.job import Job
from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.tracing import make_fx

LeafShapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def capture(
    job: Job,
    layout: BatchLayout,
    constants: Sequence[Any],
    shapes: LeafShapes,
    num_samples: int,
    dtype: torch.dtype,
) -> Graph:
    """Capture one micro-step of `job` on a micro-batch of `num_samples` samples.

    `constants` are the leaves of a batch that are not tensors (any value at the tensors' places); `dtype` is that of
    floating parameters, buffers and inputs (float64 for verification).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_model(job, mode, dtype)
    model.train()
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    aliases = tied_names(model)
    with mode:
        leaves = [
            torch.empty(shape, dtype=dtype if leaf_dtype.is_floating_point else leaf_dtype)
            for shape, leaf_dtype in shapes
        ]
    marks = Marks()
    try:
        forward, scalar_form = _trace_forward(
            job, model, parameters, buffers, aliases, layout, constants, leaves, mode, marks
        )
        if mutates(forward.graph):
            forward = functionalize(forward, [*parameters.values(), *buffers.values(), *leaves], mode)
    except (JobError, CaptureError):
        raise
    except Exception as error:
        raise explain(error) from error
    return _assemble(
        job, forward, scalar_form, parameters, buffers, aliases, layout, num_samples, mode, dtype
    )


def fake_model(job: Job, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    """The job's model with fake parameters; built for real only where its constructor needs values."""
    if isinstance(job.model, nn.Module):
        model = job.build_model()
    else:
        try:
            with mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _cast(job.build_model(), dtype)
        except Exception as error:
            if isinstance(error, JobError) and error.__cause__ is None:
                raise
            # a constructor that reads values (.item(), .tolist()) cannot run on fake tensors
            model = job.build_model()
    fake = _as_fake(model, mode)
    with mode:
        return _cast(fake, dtype)


def _cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model.to(dtype)`, in place, which torch refuses for fake tensors that something else refers to."""
    if dtype == torch.float32:
        return model
    cast: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_floating_point():
                new = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                setattr(module, name, cast.setdefault(id(parameter), (parameter, new))[1])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_floating_point():
                setattr(module, name, cast.setdefault(id(buffer), (buffer, buffer.to(dtype)))[1])
    return model


def _as_fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy with fake tensors; the memo keeps tied parameters tied, and the user's module is not touched."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach(), static_shapes=True)
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = mode.from_tensor(buffer.detach(), static_shapes=True)
    return copy.deepcopy(model, memo)


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


class _Objective(nn.Module):
    """The job's objective as a module, so that `functional_call` can replace the model's tensors."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.job = job
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.job.objective_of(self.model, batch)


def _trace_forward(
    job: Job,
    model: nn.Module,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    aliases: dict[str, str],
    layout: BatchLayout,
    constants: Sequence[Any],
    leaves: list[Tensor],
    mode: FakeTensorMode,
    marks: Marks,
) -> tuple[fx.GraphModule, bool]:
    """The forward and the loss as an aten graph, and whether the objective is a scalar (not (total, weight))."""
    wrapper = _Objective(job, model)
    scalar_form = [False]

    def forward(*flat: Tensor) -> list[Any]:
        named = dict(zip(parameters, flat, strict=False))
        rest = flat[len(parameters) :]
        state = {f"model.{name}": tensor for name, tensor in named.items()}
        state |= {f"model.{alias}": named[name] for alias, name in aliases.items()}
        state |= {f"model.{name}": tensor for name, tensor in zip(buffers, rest, strict=False)}
        tensors = iter(rest[len(buffers) :])
        filled = [
            next(tensors) if is_tensor else constants[i] for i, is_tensor in enumerate(layout.is_tensor)
        ]
        batch = pytree.tree_unflatten(filled, layout.spec)
        result = functional_call(wrapper, state, (batch,), tie_weights=False)
        if isinstance(result, Tensor):
            scalar_form[0] = True
            refuse_custom_functions(result)
            return [result]
        total, weight = result
        refuse_custom_functions(total)
        return [total, weight]

    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet())
        stack.enter_context(marks.modules_of(model))
        stack.enter_context(FunctionCapture(marks))
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        if job.precision == "bf16":
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        traced = make_fx(forward, tracing_mode="real", _allow_non_fake_inputs=True)(
            *parameters.values(), *buffers.values(), *leaves
        )
    marks.apply(traced.graph)
    return traced, scalar_form[0]


def _assemble(
    job: Job,
    forward: fx.GraphModule,
    scalar_form: bool,
    parameters: dict[str, Any],
    buffers: dict[str, Any],
    aliases: dict[str, str],
    layout: BatchLayout,
    num_samples: int,
    mode: FakeTensorMode,
    dtype: torch.dtype,
) -> Graph:
    graph = forward.graph
    new_buffers = _take_buffer_writes(graph, list(parameters), list(buffers))
    notices: list[str] = []
    total, weight, static_weight, notice = as_total_and_weight(
        graph, scalar_form, num_samples, len(parameters)
    )
    notices += notice
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        key = graph.placeholder("key")
    with mode:
        key.meta["val"] = torch.empty(3, dtype=torch.int64)
    outcome = rewrite_random(graph, key)
    if outcome.unsupported:
        raise CaptureError(
            f"the model draws random numbers with {', '.join(sorted(set(outcome.unsupported)))}, "
            "which would depend on how the batch is split.",
            fix="use rand, randn, dropout or bernoulli to have it captured; plans single and ddp run it eagerly.",
        )
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = ((total, weight, *new_buffers.values()),)
    graph.eliminate_dead_code()
    trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    joint = differentiate(forward, list(parameters), trainable, len(new_buffers), mode)
    refuse_sparse_gradients(joint.gradients)
    inputs = [
        *(("parameter", name) for name in parameters),
        *(("buffer", name) for name in buffers),
        *(("batch", f"batch.{i}") for i in range(sum(layout.is_tensor))),
        ("key", "key"),
        ("tangent", "tangent"),
    ]
    names = [node.name for node in joint.graph.nodes if node.op == "placeholder"]
    early = weight_is_early(joint, len(parameters), names)
    return Graph(
        graph=joint.graph,
        inputs=tuple(
            Input(kind=kind, name=name, node=node, trainable=name in set(trainable) and kind == "parameter")  # type: ignore[arg-type]
            for (kind, name), node in zip(inputs, names, strict=True)
        ),
        batch=layout,
        num_samples=num_samples,
        total=joint.total.name,
        weight=joint.weight.name,
        weight_is_early=early,
        static_weight=static_weight,
        gradients={name: node.name for name, node in joint.gradients.items()},
        new_buffers={name: node.name for name, node in zip(new_buffers, joint.extras, strict=True)},
        aliases=aliases,
        unused=tuple(name for name in trainable if name not in joint.gradients),
        notices=tuple(notices),
        precision=job.precision,
    )


def weight_is_early(joint: Any, num_parameters: int, names: list[str]) -> bool:
    """Whether the weight depends on the batch alone."""
    late = {*names[:num_parameters], names[-1], names[-2]}
    stack, seen = [joint.weight], set()
    while stack:
        node = stack.pop()
        if node.name in late:
            return False
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return True


def _take_buffer_writes(graph: fx.Graph, parameters: list[str], buffers: list[str]) -> dict[str, fx.Node]:
    """Remove the trailing `copy_` into buffers; return what would have been written, by buffer name."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    of_buffer = dict(zip(placeholders[len(parameters) :], buffers, strict=False))
    written: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.copy_.default:
            target, value = node.args[0], node.args[1]
            if target not in of_buffer:
                raise CaptureError(
                    "the model writes in place into a parameter or an input of the batch.",
                    fix="write to a buffer, or out of place, to have it captured; plans single and ddp run it eagerly.",
                )
            written[of_buffer[target]] = value
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return written


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
