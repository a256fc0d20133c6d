"""A captured step in float64, for comparisons: the graph is converted, not the user's code.

In: a graph in the dtypes that the user made. Out: the same graph with every floating tensor in float64, casts that the
code makes and tensors that it creates included. An op that cannot be had in float64 stays as it was, between casts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.graph import Graph
from plait.graph.ops.ending import IMPLEMENTATIONS as ENDINGS
from plait.graph.ops.island import IMPLEMENTATIONS as ISLANDS
from plait.graph.ops.island import in_float64
from plait.job.model.dtypes import wide
from plait.torch_private.fake import FakeTensor

_cast = torch.ops.aten._to_copy.default
WITHOUT_FLOAT64: set[str] = set()
"""Ops that turned out to fail in float64, of which fake tensors know nothing."""


def widened(graph: Graph) -> Graph:
    """The same graph in float64, changed in place."""
    work = _Widening(graph.graph)
    work.run()
    if work.kept:
        names = ", ".join(sorted(work.kept))
        notice = f"{names} cannot be had in float64: computed, and compared, in float32."
        graph = replace(graph, notices=(*graph.notices, notice), short=frozenset(work.kept))
    now = work.renamed
    return replace(
        graph,
        total=now.get(graph.total, graph.total),
        weight=now.get(graph.weight, graph.weight),
        gradients={name: now.get(node, node) for name, node in graph.gradients.items()},
        new_buffers={name: now.get(node, node) for name, node in graph.new_buffers.items()},
        known={},
    )


class _Widening:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.kept: set[str] = set()
        """Ops that stay as they are."""
        self.renamed: dict[str, str] = {}
        """Their results, and the same in float64."""
        self.before = {node: node.meta.get("val") for node in graph.nodes}
        self.mode = next(v.fake_mode for v in self.before.values() if isinstance(v, FakeTensor))

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):  # constants are real tensors
                node.meta |= {key: _wide(node.meta[key]) for key in ("val", "constant") if key in node.meta}
        with self.mode, torch.no_grad():
            for node in list(self.graph.nodes):
                if node.op == "call_function":
                    self._convert(node)

    def _convert(self, node: fx.Node) -> None:
        if not self._in_float64(node):
            self._as_it_was(node)
        else:
            self._count_in_float64(node)
        val = node.meta["val"]
        if isinstance(val, Tensor) and wide(val.dtype) != val.dtype:
            users = list(node.users)
            with self.graph.inserting_after(node):
                made = self._to(node, wide(val.dtype), node)
            self.before[made] = self.before[node]
            for user in users:
                user.replace_input_with(node, made)
            self.renamed[node.name] = made.name

    def _count_in_float64(self, node: fx.Node) -> None:
        """Where integers alone meet a number of Python, the result has the default dtype: they are cast before."""
        val, sources = node.meta["val"], node.all_input_nodes
        short = isinstance(val, Tensor) and wide(val.dtype) != val.dtype
        counts = [isinstance(v := s.meta["val"], Tensor) and not v.dtype.is_floating_point for s in sources]
        if not (short and sources and all(counts)) or any(s.meta["val"].is_complex() for s in sources):
            return
        given = node.args, node.kwargs
        with self.graph.inserting_before(node):
            casts = {source: self._to(source, torch.float64, node) for source in sources}
        node.args, node.kwargs = fx.node.map_arg(given, casts.__getitem__)
        try:
            made = self._value(node)
        except Exception:  # an index, or a condition
            made = None
        if isinstance(made, Tensor) and made.dtype == wide(made.dtype) and made.shape == val.shape:
            node.meta["val"] = made
            self.before.update((cast, cast.meta["val"]) for cast in casts.values())
            return
        node.args, node.kwargs = given
        for cast in casts.values():
            self.graph.erase_node(cast)

    def _in_float64(self, node: fx.Node) -> bool:
        """Whether it can be had that way."""
        if str(node.target) in WITHOUT_FLOAT64:
            return False
        given = node.args, node.kwargs
        node.args, node.kwargs = _wide_dtypes(node.args), _wide_dtypes(node.kwargs)
        if node.target in ISLANDS or node.target in ENDINGS:
            node.args = in_float64(node.args)
        try:
            node.meta["val"] = self._value(node)
        except Exception:  # no such op of float64
            node.meta["val"] = None
        if _shapes(node.meta["val"]) == _shapes(self.before[node]):
            return True
        node.args, node.kwargs = given
        return False

    def _value(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _as_it_was(self, node: fx.Node) -> None:
        self.kept.add(str(node.target))
        node.meta["val"] = self.before[node]
        with self.graph.inserting_before(node):
            for source in node.all_input_nodes:
                was, now = self.before[source], source.meta["val"]
                if isinstance(was, Tensor) and was.dtype != now.dtype:
                    node.replace_input_with(source, self._to(source, was.dtype, node))

    def _to(self, source: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        made = self.graph.call_function(_cast, (source,), {"dtype": dtype})
        made.meta = {**like.meta, "val": source.meta["val"].to(dtype)}
        return made


def _wide(value: Any) -> Any:
    return value.detach().to(wide(value.dtype)) if isinstance(value, Tensor) else value


def _wide_dtypes(arguments: Any) -> Any:
    return fx.node.map_aggregate(arguments, lambda a: wide(a) if isinstance(a, torch.dtype) else a)


def _shapes(value: Any) -> Any:
    """Of floating tensors: those of counts and indices may differ by whether they are needed."""
    if isinstance(value, tuple | list):
        return [_shapes(v) for v in value]
    is_floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.shape if is_floating else value is None
