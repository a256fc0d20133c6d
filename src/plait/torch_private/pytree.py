"""Nested containers as flat lists and back. Private to torch (`torch.utils._pytree`)."""

import dataclasses
from typing import Any

from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    register_dataclass,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "know_dataclasses",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


def know_dataclasses(tree: Any) -> Any:
    """The same tree; dataclasses in it are containers from now on."""
    left = [tree]
    while left:
        now = left.pop()
        if isinstance(now, tuple) or type(now) is list:
            left.extend(now)
        elif isinstance(now, dict):
            left.extend(now.values())
        elif dataclasses.is_dataclass(now) and not isinstance(now, type) and type(now) not in SUPPORTED_NODES:
            others = [field.name for field in dataclasses.fields(now) if not field.init]
            register_dataclass(type(now), drop_field_names=others)
            left.extend(getattr(now, field.name) for field in dataclasses.fields(now) if field.init)
    return tree
