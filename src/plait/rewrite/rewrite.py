"""Rewriting a graph: cheaper ops that compute the same, chosen by equality saturation.

In: a captured `Graph`, a device, rules. Out: `Rewritten`: the graph to go on with, what it saves and by which rules.
It acts on forward and backward together, as they were captured: what autograd and the user's hooks made stays what
they made. Names of inputs and outputs stay, and so do parameters, checkpoints and optimizers.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.cluster.cluster import Device
from plait.graph.graph import Graph
from plait.program.cost.op_time import node_work
from plait.rewrite.build import build
from plait.rewrite.constants import CONSTANT, with_constants
from plait.rewrite.extract import extract
from plait.rewrite.price import graph_seconds, price
from plait.rewrite.rules.equations import RULES, TOLD
from plait.rewrite.rules.rule import Rule
from plait.rewrite.saturate import Classes, saturate
from plait.rewrite.terms import Terms, read_terms, reason_against
from plait.rewrite.used import rules_used
from plait.units import format_seconds

MEMORY = 1.25
"""What rewritten values may take, of what they took before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewritten:
    """A graph and what became of it."""

    graph: Graph
    """The one to go on with: the same, where nothing better was found."""
    before: int
    """Ops that there were."""
    before_s: float
    """Predicted seconds of the ops as they were captured."""
    after_s: float
    """As they are now."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """Rules that the new graph is made by, and how often."""
    took_s: float
    """Seconds that the search took."""
    reason: str = ""
    """Why the graph stays."""

    @property
    def changed(self) -> bool:
        """Whether the graph is another one."""
        return self.after_s < self.before_s

    def undone(self, graph: Graph, reason: str) -> "Rewritten":
        """The graph as it was, and why."""
        return replace(self, graph=graph, after_s=self.before_s, rules={}, reason=reason)

    def line(self) -> str:
        """For people."""
        if self.reason:
            return f"rewrite: the graph stays as it is: {self.reason}."
        if not self.changed:
            return "rewrite: nothing cheaper was found."
        rules = ", ".join(self.rules) or "computing what is equal once"
        return (
            f"rewrite: {self.before} ops became {self.after}, by {rules}; "
            f"predicted {format_seconds(self.before_s)} -> "
            f"{format_seconds(self.after_s)}."
        )

    @property
    def after(self) -> int:
        """Ops that are left."""
        return sum(1 for _ in self.graph.ops())


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCosts:
    """What a graph asks of a device."""

    ops: int
    """That compute something, views included."""
    flops: float
    num_bytes: float
    """Read and written, each tensor once an op."""
    predicted_s: float
    """By the prices that were compared."""
    measured_s: float | None
    """On this machine; None: it was not run."""


def graph_costs(graph: Graph, predicted_s: float, measured_s: float | None) -> GraphCosts:
    """The costs of a graph as a person compares them."""
    nodes = list(graph.ops())
    works = [work for node in nodes if (work := node_work(node)) is not None]
    return GraphCosts(
        ops=len(nodes),
        flops=sum(work.flops for work in works),
        num_bytes=sum(work.num_bytes for work in works),
        predicted_s=predicted_s,
        measured_s=measured_s,
    )


def rewrite(
    graph: Graph,
    device: Device,
    *,
    rules: Sequence[Rule] = RULES,
    memory: float = MEMORY,
    alike: bool = False,
) -> Rewritten:
    """The cheapest graph that rules find: the same for one kind of device, however fast the machine.

    `alike`: only what has one shape is laid side by side.
    """
    began = time.monotonic()
    reason, count = reason_against(graph), sum(1 for _ in graph.ops())
    if reason is not None:
        return Rewritten(graph=graph, before=count, before_s=0.0, after_s=0.0, took_s=0.0, reason=reason)
    given = graph
    graph, constants = with_constants(given)
    terms = read_terms(graph)
    classes = saturate(terms, rules, alike=alike)
    nodes = graph.nodes()
    parameters = {classes.of_term[terms.of_node[nodes[entry.node]]] for entry in graph.inputs_of("parameter")}
    priced = price(classes, terms, parameters, device)
    written = _as_written(terms, classes)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    roots = [classes.of_term[terms.of_node[node]] for node in output.all_input_nodes]
    roots += [classes.of_term[terms.of_node[nodes[entry.node]]] for entry in graph.inputs]
    choice = extract(classes, priced, roots, written, memory)
    made = build(graph, terms, classes, choice, written)
    before_s, after_s = graph_seconds(given, device), graph_seconds(made, device)
    used = rules_used(classes, choice, written, TOLD) | ({CONSTANT: constants} if constants else {})
    if after_s >= before_s:
        made, after_s = given, before_s
    return Rewritten(
        graph=made,
        before=count,
        before_s=before_s,
        after_s=after_s,
        rules=used,
        took_s=time.monotonic() - began,
    )


def _as_written(terms: Terms, classes: Classes) -> dict[int, int]:
    """The way in which the captured graph computes each class."""
    found: dict[int, int] = {}
    for at, term in enumerate(terms.terms):
        own = classes.of_term[at]
        sources = tuple(classes.of_term[source] for source in term.tensors)
        for index, way in enumerate(classes.ways[own]):
            same = way.numbers == ((at,) if term.word in ("in", "op") else term.numbers)
            if way.word == term.word and same and way.tensors == sources:
                found.setdefault(own, index)
    return found
