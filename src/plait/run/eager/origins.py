"""Where in the user's own code something happened: the line, the module, and what first made NaN.

In: code that runs, or an exception that left it. Out: places. Nothing is computed unless somebody looks for NaN.
"""

import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from plait.job.origin import is_installed
from plait.torch_private import pytree
from plait.torch_private.autograd import line_of_differentiated
from plait.torch_private.dispatch import TorchDispatchMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A line of code that ran."""

    line: str | None
    """file:line of the user's, or of the library's where no user's is on the way."""
    module: str | None
    """The path of the innermost module."""
    op: str = ""

    def told(self) -> str:
        """To begin a sentence with."""
        file, _, number = (self.line or "").rpartition(":")
        text = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
        inside = f" in module {self.module}" if self.module else ""
        named = ": ".join(part for part in (f"`{text}`" if text else "", self.op) if part)
        return f"{self.line or 'its own code'}{inside}{f': {named}' if named else ''}"


def origin_of(error: BaseException, model: nn.Module) -> Origin:
    """Where an exception came from."""
    return _origin(list(traceback.walk_tb(error.__traceback__)), model)


def _origin(frames: Sequence[tuple[FrameType, int]], model: nn.Module, op: str = "") -> Origin:
    """Of frames from the outside in."""
    names = {id(module): name for name, module in model.named_modules()}
    owners = (frame.f_locals.get("self") for frame, _ in reversed(frames))
    module = next((names[id(owner)] for owner in owners if id(owner) in names), None)
    lines = [(frame.f_code.co_filename, number) for frame, number in frames]
    theirs = [entry for entry in lines if not is_installed(entry[0])]
    line = f"{theirs[-1][0]}:{theirs[-1][1]}" if theirs else None
    return Origin(line=line, module=module, op=op)


class Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, remembers which op made NaN of numbers, for everything that came of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._of: dict[int, tuple[Tensor, Origin | None]] = {}
        """Tensors with NaN, kept so that no other takes their id; None: it came in."""

    def of(self, tensors: Iterable[Tensor | None]) -> Origin | None:
        """What the first of these that has NaN comes from, where this is known."""
        known = (self._of[id(tensor)][1] for tensor in tensors if id(tensor) in self._of)
        return next((place for place in known if place is not None), None)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        bad = [tensor for tensor in given if id(tensor) in self._of or has_nan(tensor)]
        made = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            return made
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor) and has_nan(tensor):
                likely = sorted(bad, key=partial(_is_dropped, tensor))
                self._of[id(tensor)] = (tensor, self.of(likely) if bad else self._here(str(func)))
        return made

    def _here(self, op: str) -> Origin:
        name = op.removeprefix("aten.").removesuffix(".default")
        line = line_of_differentiated(is_installed)
        if line is None:
            return _origin(list(traceback.walk_stack(sys._getframe(2)))[::-1], self._model, name)
        return Origin(line=line, module=None, op=f"the backward of what is computed there, {name}")


def has_nan(tensor: Tensor) -> bool:
    """Whether a tensor of numbers has some that are none."""
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def _is_dropped(made: Tensor, given: Tensor) -> bool:
    """Whether NaN of an input is not to be found at its place in what came of it, as where a mask hides it."""
    return given.shape == made.shape and bool((torch.isnan(given) & ~torch.isnan(made)).any())
