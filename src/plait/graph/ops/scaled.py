"""Matrix products with weights in 8 bits: `precision="fp8"`.

In: two matrices of 16 bits. Out: their product in 16 bits. Rows of the first and columns of the second are divided by
a power of two, so that their largest entry fits, and rounded to e4m3; the product is scaled back. So no row depends on
what other rows are in the batch, and a batch that is cut over ranks gives the same numbers; dividing by powers of two
is exact, however a device or a compiler divides, and as exact as to multiply by the inverse, which takes less time.

Gradients of weights are products of activations and gradients over all samples, so that each factor has one scale: a
power of two again, so that shares of a batch differ from the whole in entries alone that are tiny beside its largest.
Activations are those that were rounded by rows, whose powers of two are brought to one. Gradients are rounded to e5m2,
whose numbers span 2^32: those of a loss of many classes differ that much. On processors the same rounding is emulated.
"""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType, ModuleType
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
_LONG = torch.float8_e5m2
"""What gradients are rounded to where one scale is for all of them."""
_LONG_SPAN = 2.0**14
"""The same of it: its largest is 57,344."""
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
    scale = _scale(x.abs().amax(1, keepdim=True), _SPAN)
    return (x.float() * scale.reciprocal()).to(SHORT).contiguous(), scale  # of a power of two: exact


def _scale(largest: Tensor, span: float) -> Tensor:
    """The power of two that makes of numbers up to `largest` some up to twice the span."""
    power = (largest.float().view(torch.int32) & _EXPONENT).view(torch.float32)
    return (power * (1 / span)).clamp_min(_SMALLEST_SCALE)


@torch.library.custom_op("plait::rounded_rows", mutates_args=())
def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, each in one piece, and what each is to be multiplied by."""
    return _rounded(x)


@rounded_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=SHORT), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@torch.library.custom_op("plait::rounded_product", mutates_args=())
def rounded_product(rows: Tensor, scale: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a @ b + bias, of rows of `a` that were rounded before."""
    return run_rounded_product(rows, scale, b, bias)


@rounded_product.register_fake
def _(rows: Tensor, scale: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return b.new_empty((rows.shape[0], b.shape[1]))


def run_rounded_product(rows: Tensor, scale: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """The op in ops that a compiler knows."""
    columns, scale_b = _rounded(b.t())
    product: Tensor = _PRODUCT(rows, columns.t(), scale, scale_b.t(), bias)
    return product


@torch.library.custom_op("plait::transposed_rows", mutates_args=())
def transposed_rows(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded rows as rounded columns, in one piece each, and what all is to be multiplied by: as 16 bits are not read
    again, nobody has to write them."""
    return run_transposed_rows(rows, scale)


@transposed_rows.register_fake
def _(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty((rows.shape[1], rows.shape[0])), scale.new_empty(())


def run_transposed_rows(rows: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The op in ops that a compiler knows."""
    largest = scale.amax()
    turned: Tensor = _TURNED(rows, scale * largest.reciprocal(), False)  # of powers of two: exact
    return turned, largest


@torch.library.custom_op("plait::transposed_short", mutates_args=())
def transposed_short(x: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient transposed and in 8 bits, its new rows in one piece each, and what all is to be multiplied by."""
    return run_transposed_short(x)


@transposed_short.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=_LONG), x.new_empty((), dtype=torch.float32)


def run_transposed_short(x: Tensor) -> tuple[Tensor, Tensor]:
    """The op in ops that a compiler knows: the largest entry of each row is found for the product by rows as well."""
    scale = _scale(x.abs().amax(1, keepdim=True).amax(), _LONG_SPAN)
    turned: Tensor = _TURNED(x, scale.reciprocal(), True)
    return turned, scale


def _turned(x: Tensor, factor: Tensor, gradient: bool) -> Tensor:
    """The transpose of x * factor, of all of it or of each row, in 8 bits."""
    dtype = _LONG if gradient else SHORT
    kernels = _kernels() if x.is_cuda else None
    if kernels is not None:
        return kernels.turn(x, factor, dtype)  # type: ignore[no-any-return]
    return (x.float() * factor).to(dtype).t().contiguous()


@cache
def _kernels() -> ModuleType | None:
    """None where this machine cannot build them."""
    try:
        from plait.graph.ops import scaled_kernels as kernels

        one = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        kernels.turn(one, one[0, 0].float(), _LONG)
        kernels.turn(one.to(SHORT), one[:, :1].float(), SHORT)
    except Exception:  # no Triton, no C compiler, a device that it does not know
        return None
    return kernels


def _register_turned() -> Any:
    if not hasattr(torch.ops.plait, "turned_short"):
        torch.library.define(
            "plait::turned_short", "(Tensor x, Tensor factor, bool gradient) -> Tensor",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )  # fmt: skip
        torch.library.impl("plait::turned_short", ("cpu", "cuda"), _turned)
        torch.library.register_fake(
            "plait::turned_short",
            lambda x, _, gradient: x.new_empty((x.shape[1], x.shape[0]), dtype=_LONG if gradient else SHORT),
        )
    return torch.ops.plait.turned_short.default


_TURNED: Any = _register_turned()


def _gradient(dtype: torch.dtype) -> Callable[..., Tensor]:
    """a @ b^T of matrices from `transposed_short`, summed in float32, as `dtype`."""

    def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        if a.is_cuda:
            return scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=False)
        return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(dtype)

    return run


def _register_gradient(name: str, dtype: torch.dtype) -> Any:
    if not hasattr(torch.ops.plait, name):
        torch.library.define(
            f"plait::{name}", "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b) -> Tensor",
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )  # fmt: skip
        torch.library.impl(f"plait::{name}", ("cpu", "cuda"), _gradient(dtype))
        torch.library.register_fake(
            f"plait::{name}", lambda a, b, *_: a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)
        )
    return getattr(torch.ops.plait, name).default


SCALED_GRADIENT: Any = _register_gradient("scaled_gradient", torch.bfloat16)
"""The gradient of a weight, of both factors in 8 bits."""
WIDE_GRADIENT: Any = _register_gradient("wide_scaled_gradient", torch.float32)
"""The same in float32."""

IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        torch.ops.plait.scaled_product.default: run_scaled_product,
        torch.ops.plait.rounded_rows.default: _rounded,
        torch.ops.plait.rounded_product.default: run_rounded_product,
        torch.ops.plait.transposed_rows.default: run_transposed_rows,
        torch.ops.plait.transposed_short.default: run_transposed_short,
    }
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


def gradients_in_short(products: frozenset[fx.Node]) -> dict[fx.Node, tuple[fx.Node, fx.Node]]:
    """Gradients of weights where 8 bits pay, of products that are in 8 bits forward and backward: what each is a
    product of, (gradient, activation)."""
    rounded = {factors[0] for node in products if (factors := _factors(node)) is not None}
    found = {}
    for activation in rounded:
        for node in activation.users:
            if node.target is not aten.mm.default or node.args[1] is not activation:
                continue
            turned = node.args[0]
            gradient = (
                turned.args[0] if isinstance(turned, fx.Node) and turned.target is aten.t.default else None
            )
            if isinstance(gradient, fx.Node) and gradient in rounded:
                columns, depth = turned.meta["val"].shape  # type: ignore[union-attr]
                if pays(columns, depth, activation.meta["val"].shape[1]):
                    found[node] = (gradient, activation)
    return found


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    if node.target is aten.mm.default and not node.kwargs:
        a, b = node.args
    elif node.target is aten.addmm.default and not node.kwargs and node.args[0].meta["val"].ndim == 1:  # type: ignore[union-attr]
        _, a, b = node.args
    else:
        return None
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return a, b
