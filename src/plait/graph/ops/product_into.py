"""Matrix products as compiled segments call them for gradients: into memory that somebody else owns, or into float32.

In: two matrices, and the memory. Out: the memory's new contents; a float32 matrix, of factors in 16 bits.
"""

from typing import Any

import torch
from torch import Tensor


def product_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b."""
    torch.mm(a, b, out=out)


def _register() -> Any:
    if not hasattr(torch.ops.plait, "product_into"):
        torch.library.define(
            "plait::product_into",
            "(Tensor a, Tensor b, Tensor(c!) out) -> ()",
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        torch.library.impl("plait::product_into", ("cpu", "cuda"), product_into)
        torch.library.register_fake("plait::product_into", lambda a, b, out: None)
    return torch.ops.plait.product_into.default


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of which the sums are not rounded to the factors' 16 bits before they are made float32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _register_wide() -> Any:
    if not hasattr(torch.ops.plait, "wide_product"):
        torch.library.define(
            "plait::wide_product", "(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
        )
        torch.library.impl("plait::wide_product", ("cpu", "cuda"), wide_product)
        torch.library.register_fake(
            "plait::wide_product",
            lambda a, b: a.new_empty((a.shape[0], b.shape[1]), dtype=torch.float32),
        )
    return torch.ops.plait.wide_product.default


PRODUCT_INTO: Any = _register()
"""The op as it stands in a graph."""
WIDE_PRODUCT: Any = _register_wide()
"""The same."""
