"""One graph through Inductor, without Dynamo. Private to torch (`torch._inductor`); tried on CUDA 13 and on CPUs.

In: a graph of aten ops and of our own, and what the tensors are like that it will be called with. Out: a function that
takes them in a list, which it may empty. What Inductor says when it cannot is told in one line. What was compiled is
kept in a folder of this user's alone, which all processes of a host share: what several want is compiled by one, and
read by the others.
"""

import copyreg
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from plait.torch_private.cache import alone, own_cache
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.tracing import make_fx
from plait.torch_private.whole_builds import build_whole, cut_off_in


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


def _reduced(value: torch.memory_format) -> tuple[Any, tuple[str]]:
    return _memory_format, (str(value).removeprefix("torch."),)


# Without this, pickle names the first module that was imported and knows torch, whichever that was: keys of Inductor's
# cache, which are pickled tensors, would differ between processes that have imported something else first.
copyreg.pickle(torch.memory_format, _reduced)


class InductorError(Exception):
    """The graph cannot be compiled, or not on this machine."""


_KNOWN = ("aten", "prims", "prim", "plait")
"""Namespaces of ops whose results lie as their rules say."""
_ALIGNED_BYTES = 16
"""On GPUs Inductor cares for where memory begins up to these; code for processors reads it wherever it lies."""


@dataclass(frozen=True, slots=True)
class Like:
    """All that compiled code depends on of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    """Elements by which it begins after memory that is aligned."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Like":
        """What this one is like; an InductorError for one that is more than memory."""
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise InductorError("it takes a tensor that is sparse, or conjugated or negated when it is read")
        offset = 0
        if tensor.is_cuda:
            offset = int(tensor.storage_offset()) % max(1, _ALIGNED_BYTES // tensor.element_size())
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, offset)

    def make(self) -> Tensor:
        """A tensor like it."""
        room = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + max(room, 0), dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride, self.offset)


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Like],
    decompositions: Mapping[Any, Callable[..., Any]],
    processes: int = 1,
) -> Callable[[list[Any]], Any]:
    """Compile for tensors like these; `decompositions`: of ops that are not torch's, or that are not to be taken
    apart as torch does it, unless they return NotImplemented.

    `processes` compile kernels, and end with this one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        made_again: set[Path] = set()
        while True:
            try:
                return _compile(graph, inputs, decompositions, processes)
            except Exception as error:
                broken = cut_off_in(own_cache(), error)
                if broken is None or broken in made_again:
                    raise InductorError(_in_one_line(error)) from error
                broken.unlink(missing_ok=True)
                made_again.add(broken)


def is_checked(graph: fx.GraphModule, inputs: Sequence[Like]) -> bool:
    """Whether compiled code looks at how results of ops lie that it calls, and raises an AssertionError where they do
    not lie as their rules for fake tensors say. Without that it would read other numbers.

    On processors, and of ops that are neither torch's nor our own, everywhere; our own are tested.
    """
    targets = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    foreign = any(target.namespace not in _KNOWN for target in targets)
    return foreign or all(like.device.type == "cpu" for like in inputs)


def _compile(
    graph: fx.GraphModule,
    inputs: Sequence[Like],
    decompositions: Mapping[Any, Callable[..., Any]],
    processes: int,
) -> Callable[[list[Any]], Any]:
    own_cache()  # before torch looks for it
    from torch._guards import TracingContext, tracing
    from torch._inductor import config  # seconds to import: not where nothing is compiled
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.compiler import config as compiler_config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    build_whole()
    mode = FakeTensorMode(shape_env=ShapeEnv())  # no shape is symbolic: Inductor's cache asks for it
    settings = {"compile_threads": processes, "size_asserts": is_checked(graph, inputs)}
    with mode:
        fakes = [entry.make() for entry in inputs]
    with mode, torch.no_grad(), config.patch(settings):
        if processes > 1:
            AsyncCompile.wait_pool_ready()  # else the first kernels are compiled here, one after the other
        table = select_decomp_table()
        table = {**table, **{op: _or(ours, table.get(op)) for op, ours in decompositions.items()}}
        traced = make_fx(graph, decomposition_table=table, tracing_mode="real")(*fakes)
        key = _key(traced)
        tagged = compiler_config.patch(cache_key_tag=key)  # type: ignore[attr-defined]
        with alone(key), tracing(TracingContext(mode)), tagged:
            return compile_fx_inner(traced, fakes)


def _or(ours: Callable[..., Any], torchs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Our decomposition, or torch's where ours is not for these tensors."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        return torchs(*args, **kwargs) if made is NotImplemented and torchs is not None else made

    return decompose


def _key(graph: fx.GraphModule) -> str:
    """By which Inductor's cache tells graphs apart, beside its own means.

    Those see the calls of a graph, and not what an op that is not torch's makes of shapes and strides: where its author
    changes that, code for the old ones would be found.
    """
    like = [map_aggregate(node.meta.get("val"), _like) for node in graph.graph.nodes]
    text = f"{graph.code}{like}{torch.get_num_threads()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), str(value.dtype), str(value.device))
    return str(value)


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
