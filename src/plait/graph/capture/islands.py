"""Modules that run eagerly inside of a captured step, because their code reads values.

In: where a trace failed. Out: calls of `plait::island` in place of the innermost module there whose results have shapes
that follow from those of its inputs. How they follow is found by running the module on real tensors of those shapes.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from plait.errors import CaptureError
from plait.graph.capture.endings import NeedsValuesError, Recording, end_eagerly
from plait.graph.capture.probe import NoIslandError, Outputs, Shape, probe
from plait.graph.ops.ending import called
from plait.graph.ops.island import NUMBER, Island, island, island_backward, name_of
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.job.model.copies import copy_of
from plait.torch_private import pytree
from plait.torch_private.dispatch import without_modes
from plait.torch_private.modules import intercept, tables_of
from plait.torch_private.tracing import tracer

ours = torch.ops.plait
_LARGEST = 0.5
"""Of the model's parameters: with more in islands, ranks of `data` would rather run all of it on their own shares."""

_ALONE = "; it cannot run by itself either: "


class Islands:
    """The islands of one job; they grow as traces fail."""

    def __init__(self, job: Job, *, all_sizes: bool = False) -> None:
        """`all_sizes`: the plan needs the inside of the model, however little of it can be captured."""
        self._job, self.all_sizes = job, all_sizes
        self._paths: dict[str, CaptureError] = {}
        """Modules that are islands, and why."""
        self._refused: set[str] = set()
        self._real: nn.Module | None = None
        self._model: nn.Module | None = None
        self.stack: tuple[str, ...] = ()
        """Modules that were running when the last trace failed, from the outside in."""
        self.failed: str | None = None
        """The island that could not be one in the last trace."""
        self.stopped: Exception | None = None
        """What ended it."""
        self._opened: frozenset[str] | None = None
        """The objective needs values outside of these modules, whose own code does too; None: it does not."""
        self._unending: set[bool] = set()
        """`all_sizes` with which it could not become one that runs eagerly from there on."""
        self._in_shares = False
        """Whether each rank runs it on its own samples."""
        self.cause: CaptureError | None = None
        """Why it was to become one."""

    def begin(self, model: nn.Module) -> None:
        """A capture starts, of this model with fake tensors."""
        self._model, self.stack, self.failed = model, (), None

    def grow(self, error: CaptureError) -> CaptureError | None:
        """Make one more island where the last trace failed; else what is to be told, as there is nothing to be one."""
        if self.failed is not None:
            error = self._why_no_island(self.failed, error)
            self._refused.add(self.failed)
            self._paths.pop(self.failed, None)
        if self._opened is not None:
            self._unending.add(self.all_sizes)
        self.failed, stack, self.stack = None, self.stack, ()
        model = self._model
        if model is None:
            return error
        everything = sum(p.numel() for p in model.parameters())
        for path in reversed(stack):
            if not path or path in self._paths or path in self._refused:
                continue
            module = model.get_submodule(path)
            alike = [name for name, other in model.named_modules() if type(other) is type(module) and name]
            alike = [name for name in alike if name not in self._refused]
            size = sum(p.numel() for name in alike for p in model.get_submodule(name).parameters())
            if size > _LARGEST * everything and not self.all_sizes:
                return self.cause or error
            self._paths |= dict.fromkeys(alike, error)
            return None
        if not stack or self.all_sizes in self._unending:
            self._opened = None
            return self.cause or error
        self._opened, self.cause = frozenset(stack[1:]), error
        return None

    def _why_no_island(self, path: str, error: CaptureError) -> CaptureError:
        """Its own line cannot be captured, and that is where there is something to mend; told with what else is."""
        cause, reason = self._paths.get(path), error.__cause__
        if cause is None or not isinstance(reason, NoIslandError):
            return error
        said = f"{cause.what.partition(_ALONE)[0].removesuffix('.')}{_ALONE}{reason}."
        return CaptureError(said, fix=cause.fix, where=cause.where)

    def objective_of(self, model: nn.Module, batch: Any, num_samples: int) -> Any:
        """What the job's objective returns; run eagerly from the line on that needs values, if there is one."""
        opened = self._opened
        if opened is None:
            return self._job.objective_of(model, batch)
        recording = Recording(model, opened, batch)
        try:
            with recording.active():
                return self._job.objective_of(model, batch)
        except Exception as error:
            if error is not self.stopped or not opened.issuperset(self.stack[1:]):
                raise
            _drop_failed(tracer().graph)
        share = 1.0 if self.all_sizes else _LARGEST
        found, self._in_shares = end_eagerly(
            self._job,
            model,
            self._module(""),
            batch,
            num_samples,
            opened,
            recording.started(),
            share * sum(p.numel() for p in model.parameters()),
        )
        return found

    def refuse_questions(self, stack: tuple[str, ...]) -> None:
        """Where code that runs eagerly asks for the outcome of a comparison, end the trace of it."""
        if self._opened is not None and self._opened.issuperset(stack[1:]):
            self.stack, self.stopped = stack, NeedsValuesError()
            raise self.stopped

    def notices(self) -> list[str]:
        """What the user should know of them."""
        told = []
        if self._opened is not None and self.cause is not None:
            seen = "its own samples" if self._in_shares else "the whole micro-batch"
            where = self.cause.where or "in code of torch"
            told.append(
                f"the objective needs values ({where}), and runs eagerly from there on: on every rank that needs its "
                f"result, for {seen}."
            )
        if not self._paths:
            return told
        names = ", ".join(list(self._paths)[:4])
        where = next((cause.where for cause in self._paths.values() if cause.where), "in code of torch")
        more = f" and {len(self._paths) - 4} more" if len(self._paths) > 4 else ""
        return [
            f"{names}{more} cannot be captured ({where}), and run{'s' if len(self._paths) == 1 else ''} eagerly "
            "between captured segments: on every rank that has a part of it, for the whole micro-batch, twice.",
            *told,
        ]

    @contextmanager
    def around(self, model: nn.Module, *, allowed: bool) -> Iterator[None]:
        """While active, calls of islands are ops."""
        chosen = [path for path in self._paths if not any(o != path and _in(path, o) for o in self._paths)]
        if chosen and not allowed:
            cause = self._paths[chosen[0]]
            raise CaptureError(
                f"the objective differentiates through {chosen[0]} ({cause.where}), which reads values.",
                fix="plans single, ddp and zero1-3 run it eagerly.",
                where=cause.where,
            )
        with contextlib.ExitStack() as stack:
            for path in chosen:
                module = model.get_submodule(path)
                module.forward = self._caller(path, module)
                stack.callback(module.__dict__.pop, "forward", None)
            yield

    def _caller(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return self._call(path, module, args, kwargs)
            except NoIslandError:
                self.failed = path
                raise

        return forward

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        named = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [*named.values(), *buffers.values()]
        numbers = [leaf for leaf in leaves if type(leaf) is int]
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        own = Island(
            owner=self._job,
            path=path,
            module=self._module(path),
            spec=spec,
            constants=tuple(
                NUMBER if type(leaf) is int else None if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ),
            is_tensor=tuple(isinstance(leaf, Tensor) for leaf in leaves),
            names=(*named, *buffers),
            written=tuple(buffers),
            autocast=autocast,
            dtype=torch.get_default_dtype(),
        )
        found = probe(own, inputs, numbers)
        own = replace(own, written=found.written)
        first = len(inputs) - len(buffers)
        for index, name in enumerate(buffers, first):
            if name in found.written:  # the backward needs what it was
                inputs[index] = inputs[index].clone()
        results = iter(_Call.apply(own, tuple(numbers), found, *inputs))  # type: ignore[no-untyped-call]
        made = [next(results) if isinstance(leaf, Shape) else leaf for leaf in found.leaves]
        with torch.no_grad():
            for name in found.written:
                buffers[name].copy_(next(results))
        return pytree.tree_unflatten(made, found.spec)

    def _module(self, path: str) -> nn.Module:
        """The user's own module, its parameters and buffers without memory."""
        if self._real is None:
            with without_modes(), kept_generators():
                model = self._job.build_model()
                model = copy_of(model) if model is self._job.model else model
                for module in model.train().modules():
                    for table in tables_of(module):
                        for name, tensor in table.items():
                            if tensor is not None:
                                table[name] = _without_memory(tensor)
                for name, module in model.named_modules():
                    intercept(module, partial(_called, name, module))
            self._real = model
        return self._real.get_submodule(path)


def _called(path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return called(path, module, args, kwargs)


def _drop_failed(graph: fx.Graph) -> None:
    """Take out the op that torch has noted though it could not run it."""
    last = next(iter(reversed(graph.nodes)))
    if "val" not in last.meta and not last.users and last.op == "call_function":
        graph.erase_node(last)


def may_be_absent(gradient: fx.Node) -> bool:
    """Whether a gradient comes from an island alone, which may not have used its parameter."""
    source: Any = gradient.args[0] if gradient.target is operator.getitem else None
    return source is not None and source.target is ours.island_backward.default


def _in(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Call(torch.autograd.Function):
    """The op, and the op of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, own: Island, numbers: tuple[int, ...], found: Outputs, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        ctx.call = (name_of(own), list(numbers))
        ctx.wanted = [i for i in found.wanted if ctx.needs_input_grad[3 + i]]
        ctx.num_returned = sum(isinstance(leaf, Shape) for leaf in found.leaves)
        made = island(
            list(inputs),
            *ctx.call,
            [len(shape) for shape, _ in found.tensors],
            [extent for shape, _ in found.tensors for extent in shape],
            " ".join(str(dtype).removeprefix("torch.") for _, dtype in found.tensors),
        )
        ctx.mark_non_differentiable(*(t for t, moves in zip(made, found.moving, strict=True) if not moves))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        if ctx.wanted:
            given = list(ctx.saved_tensors), list(grads[: ctx.num_returned])
            made = island_backward(*given, *ctx.call, ctx.wanted)
            for index, gradient in zip(ctx.wanted, made, strict=True):
                gradients[index] = gradient
        return (None, None, None, *gradients)
