"""How placements pass through ops: one small file per family, all entered in one table."""

from plait.program.place.rules import (
    indexing,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    spatial,
    views,
)
from plait.program.place.rules.base import Op, PlacementRule, find_rule

__all__ = [
    "Op",
    "PlacementRule",
    "find_rule",
    "indexing",
    "pointwise",
    "products",
    "random",
    "recurrent",
    "reductions",
    "spatial",
    "views",
]
