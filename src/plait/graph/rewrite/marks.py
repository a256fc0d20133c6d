"""Notes taken while a graph is traced: which module, source line, phase and earlier node each new node comes from.

In: the graph under construction, and calls made during tracing. Out: `meta` on its nodes.

How a backward node finds its forward op: autograd numbers its nodes as they are made, right before the op runs. The
first op that is traced after number n was given out is the one that autograd node n differentiates.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from plait.folders import PLAIT, can_be_named
from plait.torch_private.autograd import number_of_differentiated, number_of_last
from plait.torch_private.tracing import tracer

_NOTES: dict[str, Any] = {
    "phase": "forward",
    "module": "",
    "grad": True,
    "source": "",
    "number": -1,
    "owner": None,
    "again": None,
    "saves": False,
    "origin": "",
}
"""What we keep on a node, and what it is where nothing is known."""
_CAPTURE = tuple(f"{PLAIT}graph/{room}/" for room in ("capture", "rewrite"))
_BETWEEN = tuple(f"{PLAIT}{room}" for room in ("graph/ops/", "torch_private/", "graph/capture/stand_ins.py"))
"""What stands in for functions that the user's code calls."""


class Marks:
    """Where the trace is now; every node that is made gets to know it."""

    def __init__(self) -> None:
        self.phase = "forward"
        self._path: list[str] = [""]
        self._source = ""
        self._replayed: fx.Node | None = None
        self._replaying = False
        self._again: int | None = None
        """The call of torch.utils.checkpoint that the trace is in."""
        self._num_checkpoints = 0
        self._saves = False
        """Whether a hook of the user's keeps a tensor for the backward: it does so before the op itself is noted."""

    @contextmanager
    def on_nodes(self) -> Iterator[None]:
        """While active, nodes of the graph that is being traced are marked as they are made."""
        graph: fx.Graph = tracer().graph
        make = graph.create_node

        def create_node(*args: Any, **kwargs: Any) -> fx.Node:
            node = make(*args, **kwargs)
            node.meta.update(self._notes())
            return node

        graph.create_node = create_node  # type: ignore[method-assign]
        try:
            yield
        finally:
            del graph.create_node

    def _notes(self) -> dict[str, Any]:
        if self._replaying:
            origin = self._replayed.meta if self._replayed is not None else {}
            return {key: origin.get(key, default) for key, default in _NOTES.items()}
        return {
            "phase": self.phase,
            "module": self._path[-1],
            "source": self._source,
            "grad": torch.is_grad_enabled(),
            "number": number_of_last(),
            "owner": number_of_differentiated(),
            "again": self._again,
            "saves": self._saves,
        }

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """While active, nodes are noted to be computed again in the backward, with those of this outermost call."""
        before = self._again
        if before is None:
            self._num_checkpoints += 1
            self._again = self._num_checkpoints
        try:
            yield
        finally:
            self._again = before

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While active, what saved-tensor hooks compute is noted to be theirs."""
        enter = saved_tensors_hooks.__enter__

        def noted(hooks: saved_tensors_hooks) -> None:
            pack = hooks.pack_hook
            with mock.patch.object(hooks, "pack_hook", partial(self._save, pack)):
                enter(hooks)

        with mock.patch.object(saved_tensors_hooks, "__enter__", noted):
            yield

    def _save(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        before, self._saves = self._saves, True
        try:
            return pack(tensor)
        finally:
            self._saves = before

    @contextmanager
    def modules_of(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of the model's modules."""
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
                continue
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, _a, name=name: self._path.append(name), prepend=True
                )
            )
            handles.append(module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def module(self) -> str:
        """The path of the module that is running."""
        return self._path[-1]

    @property
    def path(self) -> tuple[str, ...]:
        """The modules that are running, from the outside in."""
        return tuple(self._path)

    @property
    def source(self) -> str:
        """The line of the user's that is running."""
        return self._source

    def _leave(self) -> None:
        self._path.pop()

    def source_line(self) -> None:
        """Note which line of the user's is running; recorded here as torch's stack traces cost a third of a capture."""
        line = _running_line()
        self._source = f"{line[0]}:{line[1]}" if line is not None else ""

    def at_node(self, node: fx.Node | None) -> None:
        """An earlier graph's `node` is replayed from here on."""
        self._replaying, self._replayed = True, node

    def replay_ends(self) -> None:
        """New nodes are the trace's own again."""
        self._replaying = False


def settle(graph: fx.Graph) -> None:
    """Give every backward node the name, module and line of the forward op that it belongs to."""
    first: dict[int, fx.Node] = {}
    last: fx.Node | None = None
    begun = False
    for node in graph.nodes:
        for key, default in _NOTES.items():
            node.meta.setdefault(key, default)
        begun = begun or node.meta["phase"] == "backward"
        if node.op == "call_function" and node.meta["phase"] == "forward":
            node.meta["origin"] = node.name
            if not begun and not node.meta["saves"]:  # after it, only what buffers are set to
                first.setdefault(node.meta["number"], node)
                last = node
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.meta["phase"] != "backward":
            continue
        origin = first.get(node.meta["owner"])
        if origin is None:  # a hook on a parameter, or autograd's sum of two gradients
            earlier = [by_name.get(source.meta["origin"]) for source in node.all_input_nodes]
            origin = next((entry for entry in earlier if entry is not None), last)
        node.meta["origin"] = origin.name if origin is not None else ""
        node.meta["module"] = origin.meta["module"] if origin is not None else ""
        node.meta["source"] = origin.meta["source"] if origin is not None else ""


def origin_of_last(graph: fx.Graph) -> fx.Node | None:
    """The forward op whose gradient the last node of a graph belongs to."""
    owner: int | None = next(reversed(graph.nodes)).meta.get("owner")
    last: fx.Node | None = None
    for node in graph.nodes:
        is_forward = node.op == "call_function" and node.meta.get("phase") == "forward"
        if owner is None or not is_forward or node.meta["saves"]:
            continue
        if node.meta["number"] <= owner:
            last = node
        if node.meta["number"] == owner:  # else a write into a view: numbers are given after it
            break
    return last


def _running_line() -> tuple[str, int] | None:
    """The innermost line outside of torch and plait; None where plait called torch's own modules directly."""
    frame = sys._getframe(1)
    entered = False
    while frame.f_back is not None:
        frame = frame.f_back
        filename = frame.f_code.co_filename
        if filename.startswith(_BETWEEN) or (filename.startswith(_CAPTURE) and not entered):
            continue
        entered = True
        if filename.startswith(PLAIT):
            return None
        if can_be_named(frame):
            return filename, frame.f_lineno
    return None
