"""Tracing Python into aten graphs. Not promised by torch (`torch.fx.experimental`)."""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

_ROWS = 1_000_003
"""The size that stands for any number of rows: a prime of which no other size is likely to be a multiple."""


def tracer() -> Any:
    """What is tracing: `graph` is the graph under construction, `root` holds its constants."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is being traced"
    return mode.tracer


def node_of(tensor: Tensor, by: Any = None) -> fx.Node | None:
    """The node that stands for a tensor now, or when tracing `by` has ended; None: it was not traced."""
    slot: Any = get_proxy_slot(tensor, tracer() if by is None else by, None)
    return None if slot is None else slot.proxy.node


untraced = disable_proxy_modes_tracing
"""While active, ops are run and not traced."""


def is_tracing() -> bool:
    """Whether ops are being traced now."""
    return get_proxy_mode() is not None


class Sizes:
    """Fake tensors in which two sizes are left open: how many rows there are, and how many others each row sees.

    Open sizes are symbols. Some of torch's rules for batches cannot have them: without `symbols` the rows are so many
    as nothing else is, and the others are as they are.
    """

    def __init__(self, others: int, *, symbols: bool) -> None:
        self._shapes = ShapeEnv(duck_shape=False) if symbols else None
        self.mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._rows: Any = self._open(_ROWS) if symbols else _ROWS
        self._others: Any = self._open(others) if symbols and others > 1 else others

    def _open(self, size: int) -> Any:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        return self.mode.from_tensor(torch.empty(size, device="meta"), symbolic_context=context).shape[0]

    def fake(self, like: Tensor, *, rows: bool = False, others: bool = False) -> Tensor:
        """One like `like`, with one of it for each row, and for each of the others that a row sees."""
        sizes = (*((self._rows,) if rows else ()), *((self._others,) if others else ()), *like.shape)
        with self.mode:
            return torch.empty(sizes, dtype=like.dtype, device=like.device)

    def is_rows(self, size: Any) -> bool:
        """Whether a size is the number of rows, and nothing computed from it."""
        if self._shapes is None:
            return type(size) is int and size == _ROWS
        return isinstance(size, torch.SymInt) and size.node.expr == self._rows.node.expr

    def has_rows(self, size: Any) -> bool:
        """Whether a size depends on the number of rows."""
        if self._shapes is None:
            return bool(self.times_rows(size))
        return isinstance(size, torch.SymInt) and self._rows.node.expr in size.node.expr.free_symbols

    def times_rows(self, number: Any) -> int:
        """How many times the rows a plain number is; 0: it has nothing to do with them."""
        is_known = self._shapes is None and type(number) is int and number != 0
        return number // _ROWS if is_known and number % _ROWS == 0 else 0

    @property
    def is_open(self) -> bool:
        """Whether what was traced is right for any number of rows."""
        return self._shapes is None or self._rows.node._expr not in self._shapes.replacements

    def fits(self, others: int) -> bool:
        """Whether what was traced is right for so many others: no branch was taken that they would not take."""
        if self._shapes is None or not isinstance(self._others, torch.SymInt):
            return bool(others == self._others)
        known = {self._others.node.expr: others}
        open_ = self._others.node._expr
        fixed = self._shapes.replacements.get(open_)
        if others < 2 or (fixed is not None and fixed.subs({open_: others}) != others):
            return False
        return all(guard.expr.subs(known | {open_: others}) != False for guard in self._shapes.guards)  # noqa: E712


__all__ = ["Sizes", "is_tracing", "make_fx", "node_of", "tracer", "untraced"]
