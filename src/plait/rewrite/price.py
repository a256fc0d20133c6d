"""What each way to compute something costs on a device.

In: classes, the graph's own nodes, a device. Out: `Priced`: of each way its seconds, of each class its shape and bytes.
Views cost nothing; parameters that lie side by side are a view; of several tensors put side by side in turn, each is
copied once, since the graph that is built puts them together at once.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from plait.cluster.cluster import Device
from plait.graph.cost import value_bytes
from plait.graph.graph import Graph
from plait.graph.op_family import family
from plait.graph.ops.beside import BESIDE
from plait.program.cost.op_time import node_work, op_seconds
from plait.rewrite.rules.language import WORDS
from plait.rewrite.saturate import Classes, Way
from plait.rewrite.terms import Terms

_OP_S = 1.3e-6
"""What a small elementwise op takes on a processor; measured, as all of these, on one core of a server."""
_VIEW_S = 2e-6
"""A view of another shape, or transposed."""
_PART_S = 1.2e-6
"""A slice, one of several that are made at once."""
_BESIDE_S = 2e-6
"""Parameters that lie side by side, as one."""
_PRODUCT_S = 2e-6
"""A small matrix product."""
_CONVOLUTION_S = 9e-6
"""A small convolution."""
_SHARE_OF_WINDOWS = 0.3
"""Share of the rate of products at which kernels of several positions run."""
_CACHE_BYTES_PER_S = 6e10
"""Small tensors are in the cache."""
_AHEAD_S = 1e-7
"""A view where the host is ahead of the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """Ways with what they cost."""

    seconds: list[list[float]]
    """Of each way of each class; infinite where it cannot be."""
    values: list[Any]
    """Of each class a tensor without memory; None where it is no tensor, or cannot be computed."""
    backward: list[bool]
    """Whether a class is known in the backward alone."""


def price(classes: Classes, terms: Terms, parameters: set[int], device: Device) -> Priced:
    """Price all ways; `parameters` are the classes of parameters."""
    values: list[Any] = [None] * len(classes.ways)
    backward = [False] * len(classes.ways)
    for at, own in enumerate(classes.of_term):
        value = terms.nodes[at].meta.get("val")
        values[own] = (
            torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
        )
    _fill(classes, values)
    beside = _side_by_side(classes, parameters)
    early = _early(classes, terms)
    known: dict[object, float] = {}
    joined = {
        (own, way.numbers) for own, ways in enumerate(classes.ways) for way in ways if way.word == "cat"
    }

    def seconds_of(way: Way) -> float:
        """Ways that are alike, as those of repeated blocks, are priced once."""
        if way.word in ("in", "op"):
            return _seconds(way, values, terms, beside, device)
        given = [values[source] for source in way.tensors]
        shapes = tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in given)
        copied = _share_copied(way, given, joined)
        key = (way.word, way.numbers, shapes, way.word == "cat" and set(way.tensors) <= beside, copied)
        if key not in known:
            known[key] = copied * _seconds(way, values, terms, beside, device)
        return known[key]

    seconds = [[seconds_of(way) for way in own] for own in classes.ways]
    for own, is_early in enumerate(early):
        backward[own] = not is_early
    return Priced(seconds=seconds, values=values, backward=backward)


def _share_copied(way: Way, given: list[Any], joined: set[tuple[int, tuple[Any, ...]]]) -> float:
    """Of tensors side by side, the share that is copied here: what can be so put together itself is copied there."""
    sizes = [value_bytes(value) for value in given]
    if way.word != "cat" or not sum(sizes):
        return 1.0
    own = (size for size, at in zip(sizes, way.tensors, strict=True) if (at, way.numbers) not in joined)
    return sum(own) / sum(sizes)


def graph_seconds(
    graph: Graph, device: Device, share: Callable[[fx.Node], float] = lambda node: 1.0
) -> float:
    """What the ops of a graph take, by the same prices; `share`: the part of each that a rank computes."""
    return sum(_op_seconds(node, device) * share(node) for node in graph.ops())


def _fill(classes: Classes, values: list[Any]) -> None:
    """Shapes of classes that no node of the graph is in."""
    left = [own for own, value in enumerate(values) if value is None]
    while left:
        for own in left:
            for way in classes.ways[own]:
                if way.word in WORDS and all(values[source] is not None for source in way.tensors):
                    values[own] = WORDS[way.word].run(way.numbers, [values[t] for t in way.tensors])
                    break
        rest = [own for own in left if values[own] is None]
        if len(rest) == len(left):
            return
        left = rest


def _early(classes: Classes, terms: Terms) -> list[bool]:
    """Whether a class can be computed in the forward."""
    known = [False] * len(classes.ways)
    for at, own in enumerate(classes.of_term):
        known[own] |= terms.nodes[at].meta["phase"] == "forward" and terms.nodes[at].name != "tangent"
    changed = True
    while changed:
        changed = False
        for own, ways in enumerate(classes.ways):
            if not known[own] and any(
                way.tensors and all(known[source] for source in way.tensors) for way in ways
            ):
                known[own] = changed = True
    return known


def _side_by_side(classes: Classes, parameters: set[int]) -> set[int]:
    """Classes that are parameters lying side by side, and those parameters."""
    found, grows = set(parameters), True
    while grows:
        grows = False
        for own, ways in enumerate(classes.ways):
            if own not in found and any(
                way.word == "cat" and way.numbers == (0,) and set(way.tensors) <= found for way in ways
            ):
                found.add(own)
                grows = True
    return found


def _seconds(way: Way, values: list[Any], terms: Terms, beside: set[int], device: Device) -> float:
    if way.word == "in":
        return 0.0
    if way.word == "op":
        return _op_seconds(terms.nodes[way.numbers[0]], device)
    given = [values[source] for source in way.tensors]
    if any(value is None for value in given):
        return float("inf")
    if way.word == "cat" and way.numbers == (0,) and set(way.tensors) <= beside:
        return _BESIDE_S
    graph = fx.Graph()
    nodes = []
    for number, value in enumerate(given):
        node = graph.placeholder(f"a{number}")
        node.meta["val"] = value
        nodes.append(node)
    target, args = WORDS[way.word].call(way.numbers, nodes)
    made = graph.call_function(target, args)
    try:
        plain, values_of = WORDS[way.word].call(way.numbers, given)
        made.meta["val"] = plain(*values_of)
    except RuntimeError:
        return _VIEW_S  # of what lies otherwise: shapes are right, strides are known when it is built
    seconds = _op_seconds(made, device)
    if way.word == "convx" and not device.calibration.host_s:
        return seconds - _CONVOLUTION_S  # one op with the gradient of the kernel, once it is built
    return seconds


def _op_seconds(node: fx.Node, device: Device) -> float:
    if device.calibration.host_s:  # the host is ahead of the device
        work = node_work(node)
        return op_seconds(work, device) if work is not None else _AHEAD_S
    if node.target is operator.getitem:
        return 0.0
    if node.target is BESIDE:
        return _BESIDE_S
    if node.target is torch.ops.aten.split_with_sizes.default:
        return _PART_S * len(node.meta["val"])
    work = node_work(node)
    if work is None:
        return _PART_S if node.target is torch.ops.aten.slice.Tensor else _VIEW_S
    kind = family(node.target)
    seconds = work.num_bytes / _CACHE_BYTES_PER_S
    if kind == "convolution":
        kernel: Any = node.args[2 if "backward" in str(node.target) else 1]
        small = tuple(kernel.meta["val"].shape[2:]) in ((1, 1), (1,))
        return (
            _CONVOLUTION_S
            + work.flops / (device.rate(work.dtype) * (1.0 if small else _SHARE_OF_WINDOWS))
            + seconds
        )
    if work.kind == "memory":
        return _OP_S + seconds
    return _PRODUCT_S + work.flops / device.rate(work.dtype) + seconds
