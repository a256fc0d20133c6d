"""A matrix product written to memory that somebody else owns, as one op: compiled segments call it for gradients.

In: two matrices and the memory. Out: nothing but the memory's new contents.
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


PRODUCT_INTO: Any = _register()
"""The op as it stands in a graph."""
