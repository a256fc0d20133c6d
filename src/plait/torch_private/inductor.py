"""One graph through Inductor, without Dynamo. Private to torch (`torch._inductor`); tried on CUDA 13 and on CPUs.

In: a graph of aten ops and of our own, and tensors as it will be called with. Out: a function that takes them in a
list, which it may empty. What Inductor says when it cannot is told in one line.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

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
    """Compile for tensors of these shapes, strides and devices; `decompositions`: of ops that are not torch's.

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
    from torch._inductor import config  # seconds to import: not where nothing is compiled
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode()
    fakes = [mode.from_tensor(value) for value in inputs]
    with mode, torch.no_grad(), config.patch(_settings(processes)):
        if processes > 1:
            AsyncCompile.wait_pool_ready()  # else the first kernels are compiled here, one after the other
        table = {**select_decomp_table(), **decompositions}
        traced = make_fx(graph, decomposition_table=table, tracing_mode="real")(*fakes)
        return compile_fx_inner(traced, fakes)


def _settings(processes: int) -> dict[str, Any]:
    """What an op of ours keeps for its backward is as large as a library wants it, which no fake tensor knows."""
    return {"compile_threads": processes, "size_asserts": False}


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
