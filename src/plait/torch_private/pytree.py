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
    if isinstance(tree, tuple | list):
        for item in tree:
            know_dataclasses(item)
    elif isinstance(tree, dict):
        know_dataclasses(list(tree.values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type) and type(tree) not in SUPPORTED_NODES:
        others = [field.name for field in dataclasses.fields(tree) if not field.init]
        register_dataclass(type(tree), drop_field_names=others)
        know_dataclasses([getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init])
    return tree
