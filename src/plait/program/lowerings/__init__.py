"""Local forms of ops, one small file per family, all entered in one table."""

from plait.program.lowerings import (
    indexing,
    layer_norm,
    losses,
    norms,
    products,
    random,
    reductions,
    sequence,
    shapes,
    softmax,
    spatial,
    views,
    vocabulary,
)

REGISTERED = (
    indexing,
    layer_norm,
    losses,
    norms,
    products,
    random,
    reductions,
    sequence,
    shapes,
    softmax,
    spatial,
    views,
    vocabulary,
)
"""Importing them enters their lowerings."""
