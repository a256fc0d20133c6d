"""Trace one micro-step of the user's own code: forward, loss and backward in one aten graph.

In: a fake model, a fake batch, the job. Out: a graph (parameters, buffers, batch, key, tangent) -> (total, weight,
gradients of total * tangent). The backward is autograd's own, run on the user's tensors, so hooks, hand-written
functions and gradients of gradients act as they do in eager; only the loss is read anew before it starts.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from plait.graph.capture.autocast import autocast_like
from plait.graph.capture.backward import differentiating
from plait.graph.capture.branches import Decisions
from plait.graph.capture.functions import FunctionCapture, NeedsPlainOpsError, StaleTensorError
from plait.graph.capture.islands import Islands
from plait.graph.capture.questions import Questions
from plait.graph.capture.stand_ins import stand_ins
from plait.graph.graph import BatchLayout
from plait.graph.rewrite.loss import Reading, read_pair, read_scalar, read_unknown
from plait.graph.rewrite.marks import Marks
from plait.graph.rewrite.tail import NoTailError, Tail, nodes_of, run_tail
from plait.job.job import Job
from plait.job.objective import refuse_own_gradients
from plait.torch_private import pytree
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.tracing import make_fx, node_of, tracer, untraced

__all__ = ["StaleTensorError", "Subject", "Traced", "trace"]

CHANGES_ONCE = "Its buffers change once a step, where torch's would change twice."
"""Of what is checkpointed: told, and known to whoever compares buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is traced."""

    job: Job
    model: nn.Module
    """With fake tensors."""
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    aliases: dict[str, str]
    """Tied names."""
    layout: BatchLayout
    constants: Sequence[Any]
    """Leaves of the batch that are not tensors."""
    leaves: list[Tensor]
    """Those that are, fake."""
    num_samples: int
    scalars: torch.dtype
    """Of the total, the weight and the tangent."""
    device_type: str
    """What the step will run on: autocast casts by its lists."""
    islands: Islands
    """Modules that run eagerly."""
    questions: Questions
    """What it is told where it asks whether it is traced."""

    @property
    def trainable(self) -> list[str]:
        """Parameters that a gradient is wanted of."""
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """The step as it was traced; it may still write in place."""

    module: fx.GraphModule
    """(*parameters, *buffers, *leaves, key, tangent) -> (total, weight, *gradients, *flags)."""
    reached: tuple[str, ...]
    """Parameters that have a gradient, in the order of the outputs."""
    static_weight: float | None
    """The weight as a number where it is constant."""
    notices: tuple[str, ...]
    numbers: Mapping[int, Tensor]
    """Tensors that the user's code takes for numbers, by id."""
    node_of: Callable[[Tensor], fx.Node | None]
    """The node that stands for a tensor that was left behind."""


class _Objective(nn.Module):
    """The job's objective as a module, so that `functional_call` can replace the model's tensors."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.subject = subject
        self.model = subject.model
        self.rebound: list[tuple[Tensor, Tensor]] = []

    def forward(self, batch: Any) -> Any:
        given = dict(self.model.named_buffers())
        result = self.subject.islands.objective_of(self.model, batch, self.subject.num_samples)
        found = [(given.get(name), buffer) for name, buffer in self.model.named_buffers()]
        self.rebound = [(old, new) for old, new in found if old is not None and old is not new]
        return result

    def write(self) -> None:
        """`self.average = ...`, as if it were written in place, when the backward has read what was there before."""
        with torch.no_grad():
            for before, buffer in self.rebound:
                before.copy_(buffer)


def trace(
    subject: Subject, mode: FakeTensorMode, decisions: Decisions, stale: Mapping[int, str] | None = None
) -> Traced:
    """Trace the step; an objective that differentiates is traced with ops that can be differentiated again.

    `decisions`: where Python goes on when it asks for values. `stale` are tensors
    that must not be read, by id, with what to call them in a `StaleTensorError`.
    """
    try:
        return _Trace(subject, mode, decisions, stale or {}, plain=False).run()
    except NeedsPlainOpsError:
        return _Trace(subject, mode, decisions, stale or {}, plain=True).run()


class _Trace:
    """One attempt."""

    def __init__(
        self,
        subject: Subject,
        mode: FakeTensorMode,
        decisions: Decisions,
        stale: Mapping[int, str],
        plain: bool,
    ) -> None:
        decisions.begin()
        self.decisions, self.plain = decisions, plain
        self.subject = subject
        self.mode = mode
        self.marks = Marks()
        self.functions = FunctionCapture(self.marks, plain, stale, decisions, subject.islands)
        self.wrapper = _Objective(subject)
        self.reading: Reading | None = None
        self.tangent: fx.Node | None = None
        self.reached: tuple[str, ...] = ()
        self._checkpointed: dict[str, None] = {}
        self._tracer: Any = None

    def run(self) -> Traced:
        subject = self.subject
        inputs = [*subject.parameters.values(), *subject.buffers.values(), *subject.leaves]
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_quiet())
            stack.enter_context(self.marks.modules_of(subject.model))
            stack.enter_context(self.marks.saving())
            stack.enter_context(stand_ins(self._checkpoint))
            stack.enter_context(subject.questions.answered())
            stack.enter_context(subject.islands.around(subject.model, allowed=not self.plain))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            module = make_fx(self._step, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        assert self.reading is not None and self.tangent is not None
        self._add_inputs(module.graph, self.tangent)
        return Traced(
            module=module,
            reached=self.reached,
            static_weight=self.reading.static_weight,
            notices=(*self.reading.notices, *self._checkpoint_notices(), *subject.islands.notices()),
            numbers=self.functions.numbers,
            node_of=partial(node_of, by=self._tracer),
        )

    def _step(self, *flat: Tensor) -> list[Tensor]:
        self._tracer = tracer()
        with self.marks.on_nodes():
            with self.functions, autocast_like(self.subject.job, self.subject.device_type):
                result = functional_call(
                    self.wrapper, self._state(flat), (self._batch(flat),), tie_weights=False
                )
            self._refuse_gradients(flat)
            tail = self._read(result, flat)
            scalars = self.subject.scalars
            total, weight = tail.total.detach().to(scalars), tail.weight.to(scalars)
            self.marks.phase = "backward"
            tangent = torch.ones((), dtype=scalars)
            self.tangent = next(iter(nodes_of([tangent])))
            gradients = self._differentiate(tail, tangent.to(tail.total.dtype), flat)
            self.marks.phase = "forward"
            self.wrapper.write()
            return [total, weight, *gradients, *self.decisions.flags]

    def _refuse_gradients(self, flat: Sequence[Tensor]) -> None:
        given = dict(zip(self.subject.parameters, flat, strict=False))
        try:
            refuse_own_gradients(given)
        finally:
            for parameter in given.values():
                parameter.grad = None

    @contextmanager
    def _checkpoint(self, function: Any) -> Iterator[None]:
        """Note which module is wrapped (that of the call where it is none), and which nodes it makes."""
        owner = getattr(function, "__self__", function)
        found = (name for name, module in self.subject.model.named_modules() if module is owner)
        self._checkpointed[next(found, self.marks.module)] = None
        with self.marks.checkpoint():
            yield

    def _checkpoint_notices(self) -> list[str]:
        if not self._checkpointed:
            return []
        names = ", ".join(name or "the model itself" for name in self._checkpointed)
        wrapped = [self.subject.model.get_submodule(name) for name in self._checkpointed]
        writes = any(True for module in wrapped for _ in module.buffers())
        return [
            f"torch.utils.checkpoint around {names}: what it wraps is computed again in the backward, as it says, "
            "unless the plan sets memory.recompute." + (f" {CHANGES_ONCE}" if writes else "")
        ]

    def _state(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        subject = self.subject
        named = dict(zip(subject.parameters, flat, strict=False))
        rest = flat[len(named) :]
        state = {f"model.{name}": tensor for name, tensor in named.items()}
        state |= {f"model.{alias}": named[name] for alias, name in subject.aliases.items()}
        return state | {f"model.{name}": tensor for name, tensor in zip(subject.buffers, rest, strict=False)}

    def _batch(self, flat: Sequence[Tensor]) -> Any:
        subject = self.subject
        tensors = iter(flat[len(subject.parameters) + len(subject.buffers) :])
        filled = [
            next(tensors) if is_tensor else subject.constants[i]
            for i, is_tensor in enumerate(subject.layout.is_tensor)
        ]
        return pytree.tree_unflatten(filled, subject.layout.spec)

    def _read(self, result: Any, flat: Sequence[Tensor]) -> Tail:
        """The objective's result as (total, weight), computed from live tensors."""
        graph, num_samples = tracer().graph, self.subject.num_samples
        value, weight = (result, None) if isinstance(result, Tensor) else result
        given = [value, *([weight] if isinstance(weight, Tensor) else [])]
        ends = nodes_of(given)
        live = nodes_of([*self.functions.live.values(), *flat]) | ends
        of_tensor = {id(tensor): node for node, tensor in ends.items()}
        loss = of_tensor.get(id(value))
        if loss is None:  # a constant
            value = value + 0
            loss = next(iter(nodes_of([value])))
            live[loss] = value
        with untraced():
            if weight is not None:
                self.reading = read_pair(graph, loss, of_tensor.get(id(weight), weight))
            elif not self.functions.hooked_scalar:
                self.reading = read_scalar(graph, loss, num_samples, len(self.subject.parameters))
        if self.reading is not None:
            try:
                return run_tail(self.reading.total, self.reading.weight, live, self.marks)
            except NoTailError:
                assert weight is None
        with untraced():
            self.reading = read_unknown(graph, loss, num_samples)
        return run_tail(self.reading.total, self.reading.weight, live, self.marks)

    def _differentiate(self, tail: Tail, tangent: Tensor, flat: Sequence[Tensor]) -> list[Tensor]:
        wanted = set(self.subject.trainable)
        chosen = [(n, t) for n, t in zip(self.subject.parameters, flat, strict=False) if n in wanted]
        starts = tail.gradients(tangent)
        found: Sequence[Tensor | None] = [None] * len(chosen)
        if starts and chosen:
            with differentiating(self.subject.islands):
                found = torch.autograd.grad(
                    [source for source, _ in starts],
                    [tensor for _, tensor in chosen],
                    grad_outputs=[gradient for _, gradient in starts],
                    allow_unused=True,
                )
        named = [(name, g) for (name, _), g in zip(chosen, found, strict=True) if g is not None]
        self.reached = tuple(name for name, _ in named)
        return [gradient for _, gradient in named]

    def _add_inputs(self, graph: fx.Graph, tangent: fx.Node) -> None:
        """The key of random numbers, and the tangent, which was traced as a constant for want of its dtype."""
        last = [node for node in graph.nodes if node.op == "placeholder"][-1]
        with graph.inserting_after(last):
            key = graph.placeholder("key")
        with graph.inserting_after(key):
            given = graph.placeholder("tangent")
        with self.mode:
            key.meta["val"] = torch.empty(3, dtype=torch.int64)
            given.meta["val"] = torch.empty((), dtype=tangent.meta["val"].dtype)
        tangent.replace_all_uses_with(given)
        graph.erase_node(tangent)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
