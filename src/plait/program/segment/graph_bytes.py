"""A graph as bytes, for another process of ours to compile.

In: a graph of ops, functions of modules and numbers. Out: bytes, and from these the same graph with the same names.
They are a pickle: only who trusts the writer reads them, a process that it has started itself. No weights are in it.
"""

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from plait.torch_private.ops import OpOverload, schema_of


class UnknownOpError(Exception):
    """The reader has no such op: it was defined by code that ran in the writer alone."""


def pack_graph(graph: fx.Graph, others: Mapping[str, Any]) -> bytes:
    """The bytes of a graph, and of `others` beside it; an error of any kind where something cannot be written."""
    calls = [(node.op, node.name, node.target, node.args, dict(node.kwargs)) for node in graph.nodes]
    written = io.BytesIO()
    _Writer(written, protocol=pickle.HIGHEST_PROTOCOL).dump((calls, dict(others)))
    return written.getvalue()


def unpack_graph(data: bytes) -> tuple[fx.GraphModule, dict[str, Any]]:
    """What was packed; an UnknownOpError where an op is not known here."""
    calls, others = _Reader(io.BytesIO(data)).load()
    graph, made = fx.Graph(), dict[str, fx.Node]()

    def known(entry: Any) -> Any:
        return made[entry.name] if isinstance(entry, _Name) else entry

    def here(value: Any) -> Any:
        return map_aggregate(value, known)

    for op, name, target, args, kwargs in calls:
        made[name] = graph.create_node(op, target, here(args), here(kwargs), name)
    return fx.GraphModule(torch.nn.Module(), graph), others


class _Name:
    """A node, by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> tuple[str, ...] | None:
        if isinstance(value, fx.Node):
            return ("node", value.name)
        if isinstance(value, OpOverload):
            namespace, _, name = schema_of(value).name.partition("::")
            return ("op", namespace, name, schema_of(value).overload_name or "default")
        return None


class _Reader(pickle.Unpickler):
    def persistent_load(self, known: tuple[str, ...]) -> Any:
        if known[0] == "node":
            return _Name(known[1])
        _, namespace, name, overload = known
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            raise UnknownOpError(f"{namespace}::{name} is not known to the process that compiles")
        return getattr(packet, overload)
