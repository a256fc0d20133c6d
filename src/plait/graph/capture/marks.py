"""Notes taken while a graph is traced: which module, source line or earlier node each new node comes from.

In: calls made during tracing. Out: `meta` on the nodes of the finished graph. Works by counting nodes in the graph
under construction, so it needs nothing of torch but that count.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from plait.torch_private.tracing import nodes_so_far

_NOTES: dict[str, Any] = {"phase": "forward", "module": "", "grad": True, "source": "", "origin": ""}
"""What we keep on a node, and what it is where nothing is known."""
_TORCH = str(Path(torch.__file__).parent)
_CAPTURE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parent.parent)


class Marks:
    """Where the trace was when its n-th node was made."""

    def __init__(self) -> None:
        self._modules: list[tuple[int, str]] = [(0, "")]
        self._grad: list[tuple[int, bool]] = [(0, True)]
        self._origins: list[tuple[int, fx.Node | None]] = [(0, None)]
        self._sources: list[tuple[int, tuple[str, int] | None]] = [(0, None)]
        self._path: list[str] = [""]

    @contextmanager
    def modules_of(self, model: nn.Module) -> Iterator[None]:
        """Follow the calls of the model's modules."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: self._enter(name)))
            handles.append(module.register_forward_hook(lambda _m, _a, _o: self._leave(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> None:
        self._path.append(name)
        self._modules.append((nodes_so_far(), name))

    def _leave(self) -> None:
        self._path.pop()
        self._modules.append((nodes_so_far(), self._path[-1]))

    def grad_mode(self) -> None:
        """Note whether gradients are recorded from here on."""
        enabled = torch.is_grad_enabled()
        if self._grad[-1][1] != enabled:
            self._grad.append((nodes_so_far(), enabled))

    def source_line(self) -> None:
        """Note which line of the user's is running; recorded here as torch's stack traces cost a third of a capture."""
        source = _running_line()
        if self._sources[-1][1] != source:
            self._sources.append((nodes_so_far(), source))

    def at_node(self, node: fx.Node | None) -> None:
        """Note that an earlier graph's `node` is replayed from here on."""
        self._origins.append((nodes_so_far(), node))

    def origin_of(self, index: int) -> fx.Node | None:
        """The replayed node that made the node at `index`."""
        origin: fx.Node | None = _latest(self._origins, index)
        return origin

    def apply(self, graph: fx.Graph) -> None:
        """Write module, phase, source line and grad mode into the graph's nodes."""
        for index, node in enumerate(graph.nodes):
            node.meta["phase"] = "forward"
            node.meta["module"] = _latest(self._modules, index)
            node.meta["grad"] = _latest(self._grad, index)
            source = _latest(self._sources, index) if node.op == "call_function" else None
            node.meta["source"] = f"{source[0]}:{source[1]}" if source is not None else ""

    def copy_meta(self, graph: fx.Graph) -> None:
        """Copy our meta from the replayed nodes."""
        for index, node in enumerate(graph.nodes):
            origin = self.origin_of(index)
            for key, default in _NOTES.items():
                node.meta[key] = origin.meta.get(key, default) if origin is not None else default


def _latest(marks: list[tuple[int, Any]], index: int) -> Any:
    return marks[bisect_right(marks, index, key=lambda mark: mark[0]) - 1][1]


def _running_line() -> tuple[str, int] | None:
    """The innermost line outside of torch and plait; None where plait called torch's own modules directly."""
    frame = sys._getframe(1)
    entered = False
    while frame.f_back is not None:
        frame = frame.f_back
        filename = frame.f_code.co_filename
        if filename.startswith(_CAPTURE) and not entered:
            continue
        entered = True
        if filename.startswith(_PACKAGE):
            return None
        if not filename.startswith((_TORCH, "<")):
            return filename, frame.f_lineno
    return None
