"""Tensors that are made of others and look like one: quantized weights, for one. Private to torch.

Tried on torch 2.11 to 2.13, with those of torchao.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["in_parts", "is_wrapper", "parts_of"]


def is_wrapper(tensor: Any) -> bool:
    """Whether it has no numbers of its own."""
    return isinstance(tensor, Tensor) and is_traceable_wrapper_subclass(tensor)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The ordinary tensors that it is made of; itself, if it is one."""
    yield from in_parts({"": tensor}).values()


def in_parts(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, with what wrappers are made of in their places, as `name.part`."""
    found: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if not is_wrapper(tensor):
            found[name] = tensor
            continue
        parts, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found |= in_parts({f"{name}.{part}": getattr(tensor, part) for part in parts})
    return found
