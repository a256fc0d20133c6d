"""A captured graph as terms of the language: equal terms are one, whatever nodes they came from.

In: a `Graph`. Out: `Terms`: a numbered list, each of a word, its numbers and earlier terms; what the language has no
word for is an op of its own, opaque to rules. Also who may lie side by side with whom.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from plait.graph.graph import Graph
from plait.rewrite.words import VIEWS, gradient_of, shape_of, sources_of, word_of

aten = torch.ops.aten
_STRIDED = frozenset({aten.as_strided, aten.as_strided_scatter, aten.view_as_real, aten.view_as_complex})
"""Ops whose result depends on how their input lies in memory."""
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
        return shape_of(self.nodes[one]) == shape_of(self.nodes[other])

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
        if node.target in (*VIEWS, aten.expand.default) and shape_of(node) == shape_of(node.args[0]):
            found.of_node[node] = found.of_node[node.args[0]]
            continue
        found.add(node, _term(node, found, known), known)
    nodes = graph.nodes()
    found.parameters = {found.of_node[nodes[entry.node]] for entry in graph.inputs_of("parameter")}
    return found


def _term(node: fx.Node, terms: Terms, known: dict[Term, int]) -> Term:
    if (gradient := gradient_of(node)) is not None:
        word, numbers, sources = gradient
        return Term(word, numbers, tuple(terms.of_node[source] for source in sources))
    tensors = tuple(terms.of_node[source] for source in sources_of(node))
    word, numbers = word_of(node)
    if word == "cat":  # of two at a time; a graph that is built has them at once again
        sources, first = sources_of(node), tensors[0]
        for count in range(2, len(sources)):
            part = fx.Graph().call_function(aten.cat.default)
            part.meta = {**node.meta, "val": torch.cat([s.meta["val"] for s in sources[:count]], numbers[0])}
            first = terms.add(part, Term(word, numbers, (first, tensors[count - 1])), known)
        tensors = (first, tensors[-1])
    return Term(word, numbers, tensors)


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
