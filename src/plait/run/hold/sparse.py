"""Sparse gradients as dense tensors that travel, and back.

In: a sparse gradient. Out: a dense one that still tells which rows it has: all others are negative zeros, which sums of
several ranks keep (as `plait.graph.ops.choice` does for whole gradients). Optimizers for sparse gradients update the
rows that there are, also those whose gradient is zero.
"""

import torch
from torch import Tensor


def to_dense(gradient: Tensor) -> Tensor:
    """Rows that it has begin with a number that is not a negative zero."""
    own = gradient.coalesce()
    found = torch.full(own.shape, -0.0, dtype=own.dtype, device=own.device)
    return found.index_put_(tuple(own.indices()), own.values() + 0.0)


def to_sparse(gradient: Tensor, sparse_dim: int) -> Tensor:
    """The rows that some rank has had; `sparse_dim` dims number them."""
    real = gradient.real if gradient.is_complex() else gradient
    absent = (real == 0) & torch.signbit(real)
    present = ~absent.reshape(*gradient.shape[:sparse_dim], -1).all(-1)
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(
            present.nonzero().T, gradient[present], gradient.shape, is_coalesced=True
        )
