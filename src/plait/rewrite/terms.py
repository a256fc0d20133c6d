"""A captured graph as terms of the language: equal terms are one, whatever nodes they came from.

In: a `Graph`. Out: `Terms`: a numbered list, each of a word, its numbers and earlier terms; what the language has no
word for is an op of its own, opaque to rules. Also who may lie side by side with whom.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from typing import Any

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.torch_private import pytree
from plait.torch_private.ops import OpOverload, base_name

aten = torch.ops.aten
_STRIDED = frozenset({aten.as_strided, aten.as_strided_scatter, aten.view_as_real, aten.view_as_complex})
"""Ops whose result depends on how their input lies in memory."""
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_LONGEST_RUN = 24
"""Neighbours of which any run may be merged: there are as many merges as pairs of them."""


@dataclass(frozen=True, slots=True)
class Term:
    """One value of a graph."""

    word: str
    """Of the language; `in` for what enters, `op` for what the language has no word for."""
    numbers: tuple[Any, ...]
    """Numbers, or what tells an opaque op from others."""
    tensors: tuple[int, ...]
    """Earlier terms."""


@dataclass(kw_only=True, slots=True)
class Terms:
    """A graph as terms."""

    terms: list[Term] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    """Of each term, the first node that computes it."""
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    """Every node's term."""
    parameters: set[int] = field(default_factory=set)
    """Terms of parameters."""

    def add(self, node: fx.Node, term: Term, known: dict[Term, int]) -> int:
        """The number of a term, which is new or known."""
        at = known.get(term)
        if at is None:
            at = known[term] = len(self.terms)
            self.terms.append(term)
            self.nodes.append(node)
        self.of_node[node] = at
        return at

    def have_one_shape(self, one: int, other: int) -> bool:
        """Whether two terms are alike but for their values."""
        return _shape(self.nodes[one]) == _shape(self.nodes[other])

    def inner(self, at: int, *words: str) -> int:
        """The term under some words of one tensor, such as transposes."""
        while self.terms[at].word in words:
            at = self.terms[at].tensors[0]
        return at


def reason_against(graph: Graph) -> str | None:
    """Why a graph is left as it is; None: nothing speaks against it."""
    for node in graph.ops():
        if getattr(node.target, "overloadpacket", None) in _STRIDED:
            return f"{node.target} depends on how its input lies in memory"
    if graph.flags:
        return "it branches on values"
    return None


def read_terms(graph: Graph) -> Terms:
    """The terms of a graph's nodes."""
    found, known = Terms(), dict[Term, int]()
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "output":
            continue
        if node.op != "call_function":
            found.add(node, Term("in", (number,), ()), known)
            continue
        if node.target in (*_VIEWS, aten.expand.default) and _shape(node) == _shape(node.args[0]):
            found.of_node[node] = found.of_node[node.args[0]]
            continue
        found.add(node, _term(node, found, known), known)
    nodes = graph.nodes()
    found.parameters = {found.of_node[nodes[entry.node]] for entry in graph.inputs_of("parameter")}
    return found


def _term(node: fx.Node, terms: Terms, known: dict[Term, int]) -> Term:
    if (gradient := _gradient(node)) is not None:
        word, numbers, sources = gradient
        return Term(word, numbers, tuple(terms.of_node[source] for source in sources))
    tensors = tuple(terms.of_node[source] for source in sources_of(node))
    word, numbers = _word(node)
    if word == "cat":  # of two at a time; a graph that is built has them at once again
        sources, first = sources_of(node), tensors[0]
        for count in range(2, len(sources)):
            part = fx.Graph().call_function(aten.cat.default)
            part.meta = {**node.meta, "val": torch.cat([s.meta["val"] for s in sources[:count]], numbers[0])}
            first = terms.add(part, Term(word, numbers, (first, tensors[count - 1])), known)
        tensors = (first, tensors[-1])
    return Term(word, numbers, tensors)


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, each as often as it is there."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def _word(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """The word for what a node computes, and its numbers."""
    target, args, value = node.target, node.args, node.meta.get("val")
    if not isinstance(value, torch.Tensor) or node.kwargs or not isinstance(target, OpOverload):
        return "op", _signature(node)
    if target is aten.mm.default:
        return "mm", ()
    if target is aten.bmm.default:
        return "bmm", ()
    if target is aten.addmm.default and _shape(args[0]) == (value.shape[1],):
        return "addmm", ()
    if target is aten.t.default and value.ndim == 2:
        return "t", ()
    if target in (aten.transpose.int, aten.permute.default):
        order = _order_of(node)
        return ("t", ()) if order == [1, 0] else ("perm", (",".join(map(str, order)),))
    if target is aten.add.Tensor and len(args) == 2 and _all_like(node):
        return "add", ()
    if target is aten.cat.default and (dim := _joined_dim(node)) is not None:
        return "cat", (dim,)
    if target in (aten.mul.Tensor, aten.div.Tensor) and (factor := _factor(node)) is not None:
        return "scale", (factor,)
    if target is aten.slice.Tensor and (bounds := _bounds(node)) is not None:
        return "slice", bounds
    if target in _VIEWS:
        return "view", (",".join(map(str, value.shape)),)
    if target is aten.sum.dim_IntList and value.ndim == 2 and list(args[1]) == [0] and args[2:] == (True,):  # type: ignore[arg-type]
        return "rowsum", ()
    if target is aten.convolution.default and (settings := _plain_convolution(node)) is not None:
        return ("conv" if args[2] is None else "convb"), settings
    return _elementwise(node) or ("op", _signature(node))


def _gradient(node: fx.Node) -> tuple[str, tuple[Any, ...], list[fx.Node]] | None:
    """The word for one of the gradients of a convolution, its numbers and what it is made of."""
    if node.target is not operator.getitem:
        return None
    source: Any = node.args[0]
    if source.target is not aten.convolution_backward.default:
        return None
    gradient, image, kernel, _, stride, padding, dilation, transposed, _, groups, _ = source.args
    if transposed or groups != 1 or gradient.meta["val"].ndim != 4:
        return None
    if node.args[1] == 2:
        return "convs", (), [gradient]
    return ("convx", "convw")[node.args[1]], _settings(stride, padding, dilation), [gradient, image, kernel]  # type: ignore[index]


def _settings(stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    return ",".join(map(str, stride)), *map(int, padding), ",".join(map(str, dilation))


def _joined_dim(node: fx.Node) -> int | None:
    """The dim along which tensors of one kind are joined; None: there is one alone, or they differ in kind."""
    value, given = node.meta["val"], [source.meta["val"] for source in sources_of(node)]
    alike = all(tensor.ndim == value.ndim and tensor.dtype == value.dtype for tensor in given)
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return int(dim) % value.ndim if len(given) > 1 and alike else None


def _factor(node: fx.Node) -> float | None:
    """The number that a tensor is multiplied with; None: it is another tensor, or changes what kind it is."""
    source, factor = node.args
    same = isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
    if not same or isinstance(factor, bool) or not isinstance(factor, (int, float)):
        return None
    if node.target is aten.div.Tensor:
        factor = 1 / factor if factor else inf
    return float(factor) if node.meta["val"].is_floating_point() and isfinite(factor) else None


def _plain_convolution(node: fx.Node) -> tuple[Any, ...] | None:
    """Stride, padding and dilation of a convolution of images without groups; None: it is another one."""
    _, _, _, stride, padding, dilation, transposed, _, groups = node.args
    if transposed or groups != 1 or node.meta["val"].ndim != 4:
        return None
    return _settings(stride, padding, dilation)


def _elementwise(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    """The word for a function of one or two tensors, element by element."""
    target, value = node.target, node.meta["val"]
    tensors = [arg for arg in node.args if isinstance(arg, fx.Node)]
    rest = node.args[len(tensors) :]
    if not isinstance(target, OpOverload) or target.namespace != "aten" or len(tensors) not in (1, 2):
        return None
    if torch.Tag.pointwise not in target.tags and target is not aten.threshold_backward.default:
        return None
    alike = all(_shape(t) == tuple(value.shape) and t.meta["val"].dtype == value.dtype for t in tensors)
    if not alike or any(isinstance(arg, bool) or not isinstance(arg, (int, float)) for arg in rest):
        return None
    name = f"{base_name(target)}.{_overload(target)}"
    return f"map{len(tensors)}", (" ".join([name, *map(repr, rest)]),)


def _overload(target: Any) -> str:
    return str(target).rpartition(".")[2]


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """What tells an op from others of the same inputs; of ops that are not torch's own, each is one of a kind."""
    pure = node.target is operator.getitem or (
        isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    )
    shown = pytree.tree_map(lambda leaf: "." if isinstance(leaf, fx.Node) else leaf, (node.args, node.kwargs))
    return (f"{node.target}{shown}" if pure else f"{node.target} {node.name}",)


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, torch.Tensor) else (-1,)


def _all_like(node: fx.Node) -> bool:
    """Whether all arguments are tensors like the result."""
    value = node.meta["val"]
    given = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
    return len(given) == len(node.args) and all(
        isinstance(v, torch.Tensor) and v.shape == value.shape and v.dtype == value.dtype for v in given
    )


def _order_of(node: fx.Node) -> list[int]:
    """The dims of a node's source in the order in which it has them."""
    ndim, dims = node.meta["val"].ndim, node.args[1:]
    if node.target is aten.permute.default:
        return [int(dim) % ndim for dim in dims[0]]  # type: ignore[union-attr,arg-type]
    one, two = (int(dim) % ndim for dim in dims)  # type: ignore[arg-type]
    order = list(range(ndim))
    order[one], order[two] = two, one
    return order


def _bounds(node: fx.Node) -> tuple[int, int, int] | None:
    """(dim, start, end) of a slice that leaves nothing out in between."""
    source: Any = node.args[0]
    shape = _shape(source)
    given: tuple[Any, ...] = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim, start, end, step = given
    length = shape[dim % len(shape)]
    start, end = (
        0 if start is None else max(min(start + length if start < 0 else start, length), 0),
        length if end is None else max(min(end + length if end < 0 else end, length), 0),
    )
    return (dim % len(shape), start, end) if step == 1 and start < end else None


def weights(terms: Terms) -> set[int]:
    """Terms that are made of parameters alone."""
    found: set[int] = set()
    for at, term in enumerate(terms.terms):
        if at in terms.parameters or (term.tensors and all(source in found for source in term.tensors)):
            found.add(at)
    return found


def neighbours(terms: Terms) -> Iterator[tuple[int, int]]:
    """Pairs of terms of which the second may lie right after the first.

    They are operands of products that share their other operand, or that are added; all runs follow one order, that
    of parameters and of what is multiplied with them, so that no run leads back to its beginning.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    partner: dict[int, int] = {}
    for term in terms.terms:
        if term.word == "mm":
            left, right = term.tensors
            groups.setdefault(("of", right), []).append(left)
            groups.setdefault(("with", left), []).append(right)
            base = terms.inner(right, "t")
            if terms.terms[base].word == "in":
                partner.setdefault(terms.inner(left, "t"), base)
        elif term.word in ("conv", "convb"):
            groups.setdefault((term.word, term.tensors[0]), []).append(term.tensors[1])
        elif term.word == "addmm":
            groups.setdefault(("with", term.tensors[1]), []).append(term.tensors[2])
    inside: set[int] = set()
    for at in reversed(range(len(terms.terms))):
        if terms.terms[at].word == "add" and at not in inside:
            added = [terms.terms[part] for part in _summands(terms, at, inside)]
            groups[("sum", at)] = [part.tensors[1] for part in added if part.word == "mm"]

    def order(at: int) -> tuple[int, int]:
        base = terms.inner(at, "t")
        return partner.get(base, base), base

    for group in groups.values():
        run = sorted(set(group), key=order)
        for start in range(0, len(run), _LONGEST_RUN):
            part: Sequence[int] = run[start : start + _LONGEST_RUN]
            yield from pairwise(part)


def _summands(terms: Terms, at: int, inside: set[int]) -> list[int]:
    """What a sum of sums adds up, seen through views; the sums in it are noted."""
    found, left = [], [at]
    while left:
        inner = terms.inner(left.pop(), "view")
        if terms.terms[inner].word == "add":
            inside.add(inner)
            left.extend(reversed(terms.terms[inner].tensors))
        else:
            found.append(inner)
    return found
