"""Matrix products with weights in 8 bits: `precision="fp8"`.

In: two matrices of 16 bits. Out: their product in 16 bits. Rows of the first and columns of the second are divided by
a power of two, so that their largest entry fits, and rounded to e4m3; the product is scaled back. So no row depends on
what other rows are in the batch, and a batch that is cut over ranks gives the same numbers; dividing by powers of two
is exact, however a device or a compiler divides, and as exact as to multiply by the inverse, which takes less time. Products of activations and gradients, which make
gradients of weights, stay in 16 bits. On processors the same rounding is emulated.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from plait.graph.graph import Graph
from plait.torch_private.ops import scaled_mm

aten = torch.ops.aten
SHORT = torch.float8_e4m3fn
"""What factors are rounded to."""
_SPAN = 2.0**7
"""The largest entry of a row becomes this to twice this; the largest number in 8 bits is 448."""
_EXPONENT = 0x7F800000
"""The bits of a float32 that say its power of two."""
_SMALLEST_SCALE = 2.0**-100
"""Of a row of zeros."""
_STEP = 16
"""Tensor cores take rows and columns in multiples of this."""
_SAVED_S = 6e-16
"""Seconds that 8 bits save for each FLOP on an H100 or H200: 700 TFLOP/s become 1,200."""
_ROUNDING_S = 1e-12
"""Seconds to read an entry of a factor and write it rounded, there: 3 bytes, fused with what makes it."""


@torch.library.custom_op("plait::scaled_product", mutates_args=())
def scaled_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias, the factors in 8 bits."""
    return run_scaled_product(a, b, bias)


@scaled_product.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _of_short(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
    """The product of rounded factors; `b` has its columns in one piece each."""
    if a.is_cuda:
        return scaled_mm(a, b, scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
    product = (a.float() @ b.float()) * scale_a * scale_b
    return (product if bias is None else product + bias).bfloat16()


def _register() -> Any:
    if not hasattr(torch.ops.plait, "product_of_short"):
        torch.library.define(
            "plait::product_of_short",
            "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias) -> Tensor",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )
        torch.library.impl("plait::product_of_short", ("cpu", "cuda"), _of_short)
        torch.library.register_fake(
            "plait::product_of_short",
            lambda a, b, *_: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16),
        )
    return torch.ops.plait.product_of_short.default


_PRODUCT: Any = _register()


def run_scaled_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """The op in ops that a compiler knows: rounding is fused with what makes the factors."""
    rows, scale_a = _rounded(a)
    columns, scale_b = _rounded(b.t())
    product: Tensor = _PRODUCT(rows, columns.t(), scale_a, scale_b.t(), bias)
    return product


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, each in one piece, and what each is to be multiplied by."""
    largest = x.abs().amax(1, keepdim=True).float()
    power = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)  # of two, below the largest entry
    scale = (power * (1 / _SPAN)).clamp_min(_SMALLEST_SCALE)
    return (x.float() * scale.reciprocal()).to(SHORT).contiguous(), scale  # of a power of two: exact


IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {torch.ops.plait.scaled_product.default: run_scaled_product}
)
"""What runs it; compiled segments are traced through it."""


def suits(rows: int, depth: int, columns: int) -> bool:
    """Whether devices have a kernel for a product of this shape."""
    return rows > 0 and depth % _STEP == 0 and columns % _STEP == 0


def pays(rows: int, depth: int, columns: int) -> bool:
    """Whether 8 bits save more time than rounding takes: the same for all plans and devices, as it changes numbers."""
    saved = 2.0 * rows * depth * columns * _SAVED_S
    return saved > (rows + columns) * depth * _ROUNDING_S


_THROUGH = (
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default),
    *(aten._to_copy.default, aten.detach.default, aten.reshape.default),
)
"""What is still a weight."""


def products_in_short(graph: Graph) -> frozenset[fx.Node]:
    """The products of a graph whose second factor is a weight, where 8 bits pay; none where the job asks for none."""
    if graph.precision != "fp8":
        return frozenset()
    names = {entry.node for entry in graph.inputs_of("parameter")}
    weights = {node for node in graph.graph.nodes if node.op == "placeholder" and node.name in names}
    found = set()
    for node in graph.ops():
        if node.target in _THROUGH and node.args[0] in weights:
            weights.add(node)
        factors = _factors(node)
        if factors is not None and factors[1] in weights:
            a, b = (factor.meta["val"] for factor in factors)
            if a.dtype == torch.bfloat16 and pays(a.shape[0], a.shape[1], b.shape[1]):
                found.add(node)
    return frozenset(found)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    if node.target is aten.mm.default and not node.kwargs:
        a, b = node.args
    elif node.target is aten.addmm.default and not node.kwargs and node.args[0].meta["val"].ndim == 1:  # type: ignore[union-attr]
        _, a, b = node.args
    else:
        return None
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b
