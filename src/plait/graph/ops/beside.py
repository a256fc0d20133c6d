"""Parameters one after the other along dim 0, as one tensor: a view where they lie so in memory, else a copy.

In: tensors that are alike but for dim 0. Out: all of them as one. Who holds parameters lays them side by side
(`run/hold`); nothing here depends on it but time.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from plait.graph.graph import Graph


@torch.library.custom_op("plait::beside", mutates_args=())
def beside(tensors: list[Tensor]) -> Tensor:
    """[N, ...] and [M, ...] give [N + M, ...]."""
    return torch.cat(tensors)


@beside.register_fake
def _(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def run_beside(tensors: Sequence[Tensor]) -> Tensor:
    """The op on real tensors."""
    first, rows, end = tensors[0], 0, tensors[0].storage_offset()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.storage_offset() != end:
            return torch.cat(list(tensors))
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(tensors))
        rows += tensor.shape[0]
        end += tensor.numel()
    return first.as_strided((rows, *first.shape[1:]), first.stride())


BESIDE: Any = torch.ops.plait.beside.default
"""The op as it stands in a graph."""
IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType({BESIDE: run_beside})


def parameters_beside(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Parameters of a graph that are read as one tensor, in order."""
    names = {entry.node: entry.name for entry in graph.inputs_of("parameter")}
    found = (node for node in graph.ops() if node.target is BESIDE)
    return tuple(tuple(names[source.name] for source in node.all_input_nodes) for node in found)
