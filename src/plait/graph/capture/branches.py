"""Steps that branch on values: traced once for every outcome.

In: a function that traces the step under given outcomes. Out: every way through it, for `merge.py` to put together.
"""

import linecache
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from plait.errors import CaptureError, PlaitError
from plait.folders import PLAIT
from plait.graph.graph import Graph
from plait.torch_private import pytree
from plait.torch_private.fake import storage_of
from plait.torch_private.ops import OpOverload, schema_of
from plait.torch_private.tracing import node_of

MOST = 8
"""Ways through a step that compute something, at most."""
_TRACED = 64
"""Ways that are tried at most, with those that end in an error: a check of values is a way of its own."""

_MACHINERY = tuple(
    f"{torch.__path__[0]}/{part}"
    for part in ("_", "fx/", "func/", "autograd/", "utils/", "library.py", "overrides.py")
)
"""Files of torch that trace: what they raise says nothing of the model. Others check values as models do."""


class Decisions:
    """What Python is told when it asks for the outcome of a comparison, in one trace."""

    def __init__(self, given: Sequence[bool]) -> None:
        self._given = tuple(given)
        self.begin()

    def begin(self) -> None:
        """A trace starts; there may be several."""
        self._known: dict[object, bool] = {}
        self.outcomes: list[bool] = []
        self.flags: list[Tensor] = []
        self.sources: list[str] = []

    def decide(self, flag: Tensor, source: str) -> bool:
        """The outcome, as given; beyond that, no. The same question has the same answer."""
        node = node_of(flag)
        key = _key(node) if node is not None else id(flag)
        if key not in self._known:
            index = len(self.outcomes)
            self._known[key] = self._given[index] if index < len(self._given) else False
            self.outcomes.append(self._known[key])
            self.flags.append(flag)
            self.sources.append(source)
        return self._known[key]


def _key(node: fx.Node) -> object:
    """What a node computes, as a value: no two draws of random numbers are the same, nor what a write lies between."""
    keys: dict[fx.Node, object] = {}
    stack = [node]
    while stack:
        last = stack[-1]
        missing = [source for source in last.all_input_nodes if source not in keys]
        if missing:
            stack += missing
            continue
        stack.pop()
        if last.op == "call_function":
            drawn = torch.Tag.nondeterministic_seeded in getattr(last.target, "tags", ())
            own = last.name if drawn else str(last.target)
            keys[last] = hash((own, frozen((last.args, last.kwargs), keys)))
        else:
            keys[last] = hash((last.op, str(last.target)))
    memory = {storage for source in keys for storage in _storages(source)}
    return keys[node], sum(_writes(other, memory) for other in node.graph.nodes)


def _writes(node: fx.Node, memory: set[int]) -> bool:
    """Whether a node writes there; what an op has written it gives back, if it gives anything."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    written = _storages(node)
    return not written or bool(memory & written)


def _storages(node: fx.Node) -> set[int]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return {storage_of(x) for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided}


def frozen(value: Any, nodes: Any) -> object:
    """Arguments as something that can be hashed; nodes by what `nodes` has for them."""
    if isinstance(value, fx.Node):
        return ("node", nodes[value])
    if isinstance(value, (tuple, list)):
        return ("list", *(frozen(entry, nodes) for entry in value))
    if isinstance(value, dict):
        return ("dict", *((key, frozen(entry, nodes)) for key, entry in sorted(value.items())))
    return (type(value).__name__, repr(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """The step under one list of outcomes."""

    outcomes: tuple[bool, ...]
    sources: tuple[str, ...]
    """The line of each question."""
    graph: Graph | None
    """Its `flags` are the questions; None: the user's code raises."""
    error: str = ""


def explore(trace: Callable[[Decisions], Graph]) -> list[Way]:
    """Every way through the step; raises where there are too many, or one cannot be traced."""
    ways: list[Way] = []
    open_ways: list[tuple[bool, ...]] = [()]
    while open_ways:
        given = open_ways.pop()
        decisions = Decisions(given)
        graph, error = None, ""
        try:
            graph = trace(decisions)
        except PlaitError:
            raise
        except Exception as raised:
            if not decisions.outcomes or (told := _raised_by_user(raised)) is None:
                raise
            error = told
        outcomes = tuple(decisions.outcomes)
        ways.append(Way(outcomes=outcomes, sources=tuple(decisions.sources), graph=graph, error=error))
        open_ways += [(*outcomes[:i], not outcomes[i]) for i in range(len(given), len(outcomes))]
        made = sum(way.graph is not None for way in ways)
        if made + (len(open_ways) if made else 0) > MOST or len(ways) > _TRACED:
            where = decisions.sources[-1]
            raise CaptureError(
                f"the forward branches on values in more than {MOST} ways, the last at {where}.",
                fix="compute with torch.where to have it captured; plans single, ddp and zero1-3 run it eagerly.",
                where=where,
            )
    return ways


def _raised_by_user(error: Exception) -> str | None:
    """What a `raise` or `assert` of the user's, or of a library's, says; None: something else failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    if re.search(r"\b(raise|assert)\b", line) is None or frame.filename.startswith((PLAIT, *_MACHINERY)):
        return None
    said = str(error).partition("\n")[0]  # what follows shows tensors, which have no values yet
    return f"{type(error).__name__}: {said} ({frame.filename}:{frame.lineno} in {frame.name}: `{line}`)"
