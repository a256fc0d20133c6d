"""The words that rules are written in: a few ops of aten, each with numbers first and tensors after.

In: a word, its numbers, its tensors. Out: the op of aten that it stands for, as a target and its arguments. The same
table runs a rule's two sides in its proof, gives shapes to prices and makes the nodes of a rewritten graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One op of the language."""

    numbers: tuple[str, ...] = ()
    """Sorts of what comes before the tensors: `i64`, `f64`, `String`."""
    tensors: int
    """How many follow."""
    call: Callable[[Sequence[Any], Sequence[Any]], Call]
    """(numbers, tensors) -> the op of aten and its arguments."""
    item: int | None = None
    """Which of the op's results it is; None: it has one."""

    def run(self, numbers: Sequence[Any], tensors: Sequence[Any]) -> Any:
        """Compute it."""
        target, args = self.call(numbers, tensors)
        made = target(*args)
        return made if self.item is None else made[self.item]


def order_of(text: str) -> tuple[int, ...]:
    """Dims as a word has them: `0,2,1`."""
    return tuple(int(dim) for dim in text.split(",") if dim)


def _settings(numbers: Sequence[Any]) -> list[list[int]]:
    """Stride, padding and dilation."""
    stride, high, wide, dilation = numbers
    return [[*order_of(stride)], [high, wide], [*order_of(dilation)]]


def _gradient(item: int) -> Callable[[Sequence[Any], Sequence[Any]], Call]:
    """One of the gradients of a convolution, of (gradient of its result, image, kernel)."""
    mask = [item == index for index in range(3)]

    def call(numbers: Sequence[Any], tensors: Sequence[Any]) -> Call:
        settings = _settings(numbers)
        return aten.convolution_backward.default, (*tensors, None, *settings, False, [0, 0], 1, mask)

    return call


def _convolution(numbers: Sequence[Any], tensors: Sequence[Any]) -> Call:
    stride, padding, dilation = _settings(numbers)
    bias = tensors[2] if len(tensors) == 3 else None
    none = [0] * len(stride)
    return aten.convolution.default, (
        tensors[0], tensors[1], bias, stride, padding, dilation, False, none, 1,
    )  # fmt: skip


def _mapped(numbers: Sequence[Any], tensors: Sequence[Any]) -> Call:
    """An elementwise op by its name and the numbers after its tensors: `threshold_backward.default 0`."""
    name, *rest = numbers[0].split()
    packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload), (*tensors, *map(float, rest))


_CONVOLUTION = ("String", "i64", "i64", "String")
"""Stride, padding of height and width, dilation."""
WORDS: Mapping[str, Word] = MappingProxyType(
    {
        "mm": Word(tensors=2, call=lambda n, t: (aten.mm.default, (t[0], t[1]))),
        "bmm": Word(tensors=2, call=lambda n, t: (aten.bmm.default, (t[0], t[1]))),
        "addmm": Word(tensors=3, call=lambda n, t: (aten.addmm.default, (t[0], t[1], t[2]))),
        "t": Word(tensors=1, call=lambda n, t: (aten.t.default, (t[0],))),
        "add": Word(tensors=2, call=lambda n, t: (aten.add.Tensor, (t[0], t[1]))),
        "scale": Word(numbers=("f64",), tensors=1, call=lambda n, t: (aten.mul.Tensor, (t[0], n[0]))),
        "cat": Word(numbers=("i64",), tensors=2, call=lambda n, t: (aten.cat.default, ([*t], n[0]))),
        "slice": Word(
            numbers=("i64", "i64", "i64"),
            tensors=1,
            call=lambda n, t: (aten.slice.Tensor, (t[0], n[0], n[1], n[2])),
        ),
        "view": Word(
            numbers=("String",),
            tensors=1,
            call=lambda n, t: (aten.view.default, (t[0], [*order_of(n[0])])),
        ),
        "perm": Word(
            numbers=("String",),
            tensors=1,
            call=lambda n, t: (aten.permute.default, (t[0], [*order_of(n[0])])),
        ),
        "rowsum": Word(tensors=1, call=lambda n, t: (aten.sum.dim_IntList, (t[0], [0], True))),
        "pad": Word(
            numbers=("i64", "i64"),
            tensors=1,
            call=lambda n, t: (aten.constant_pad_nd.default, (t[0], [n[1], n[1], n[0], n[0]])),
        ),
        "conv": Word(numbers=_CONVOLUTION, tensors=2, call=_convolution),
        "convb": Word(numbers=_CONVOLUTION, tensors=3, call=_convolution),
        "convx": Word(numbers=_CONVOLUTION, tensors=3, call=_gradient(0), item=0),
        "convw": Word(numbers=_CONVOLUTION, tensors=3, call=_gradient(1), item=1),
        "convs": Word(tensors=1, call=lambda n, t: (aten.sum.dim_IntList, (t[0], [0, 2, 3]))),
        "map1": Word(numbers=("String",), tensors=1, call=_mapped),
        "map2": Word(numbers=("String",), tensors=2, call=_mapped),
    }
)
"""By name."""
