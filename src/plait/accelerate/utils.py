"""Accelerate's `accelerate.utils`, for scripts that import from there."""

from plait.accelerate.functions import DistributedType, set_seed

__all__ = ["DistributedType", "set_seed"]
