"""One graph through Inductor, without Dynamo. Private to torch (`torch._inductor`); tried on CUDA 13 and on CPUs.

In: a graph of aten ops and of our own, and tensors as it will be called with. Out: a function that takes them in a
list, which it may empty. What Inductor says when it cannot is told in one line. Kernels are kept in a folder of this
user's alone, which all processes of a host share: what several want is compiled by one, and read by the others.
"""

import fcntl
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from plait.torch_private.cache import own_cache
from plait.torch_private.fake import FakeTensorMode
from plait.torch_private.tracing import make_fx


class InductorError(Exception):
    """The graph cannot be compiled, or not on this machine."""


def compile_graph(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    processes: int = 1,
) -> Callable[[list[Any]], Any]:
    """Compile for tensors of these shapes, strides and devices; `decompositions`: of ops that are not torch's, or that
    are not to be taken apart as torch does it, unless they return NotImplemented.

    `processes` compile kernels, and end with this one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        try:
            return _compile(graph, inputs, decompositions, processes)
        except Exception as error:
            raise InductorError(_in_one_line(error)) from error


def _compile(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    processes: int,
) -> Callable[[list[Any]], Any]:
    cache = own_cache()  # before torch looks for it
    from torch._guards import TracingContext, tracing
    from torch._inductor import config  # seconds to import: not where nothing is compiled
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.compiler import config as compiler_config
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())  # no shape is symbolic: Inductor's cache asks for it
    fakes = [mode.from_tensor(value, static_shapes=True) for value in inputs]
    with mode, torch.no_grad(), config.patch(_settings(processes)):
        if processes > 1:
            AsyncCompile.wait_pool_ready()  # else the first kernels are compiled here, one after the other
        table = select_decomp_table()
        table = {**table, **{op: _or(ours, table.get(op)) for op, ours in decompositions.items()}}
        traced = make_fx(graph, decomposition_table=table, tracing_mode="real")(*fakes)
        key = _key(traced)
        tagged = compiler_config.patch(cache_key_tag=key)  # type: ignore[attr-defined]
        with _alone(cache, key), tracing(TracingContext(mode)), tagged:
            return compile_fx_inner(traced, fakes)


def _or(ours: Callable[..., Any], torchs: Callable[..., Any] | None) -> Callable[..., Any]:
    """Our decomposition, or torch's where ours is not for these tensors."""

    def decompose(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        return torchs(*args, **kwargs) if made is NotImplemented and torchs is not None else made

    return decompose


@contextmanager
def _alone(folder: Path, key: str) -> Iterator[None]:
    """While active, no other process of this host compiles the same; who comes later finds it compiled."""
    locks = folder / "plait-locks"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(locks / key, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the kernel takes it back from a process that dies
        yield


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


def _settings(processes: int) -> dict[str, Any]:
    """What an op of ours keeps for its backward is as large as a library wants it, which no fake tensor knows."""
    return {"compile_threads": processes, "size_asserts": False}


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
