"""Ops as objects: their type, their schema and what they call. Private to torch (`torch._ops`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "OpOverload",
    "arguments_of",
    "assert_async",
    "base_name",
    "cudnn_rnn",
    "cudnn_rnn_backward",
    "direct_call",
    "grouped_mm",
    "scaled_mm",
    "schema_of",
]

grouped_mm = torch._grouped_mm
"""What `torch.nn.functional.grouped_mm` calls, and libraries call without it."""
cudnn_rnn = torch.ops.aten._cudnn_rnn.default
cudnn_rnn_backward = torch.ops.aten._cudnn_rnn_backward.default
"""What `torch.lstm` calls on a GPU, and its gradient."""
assert_async = torch._assert_async
"""Raises where a tensor is false; a GPU, which is not waited for, as it does at an index out of range."""
scaled_mm = torch._scaled_mm
"""The product of two 8-bit matrices, rows and columns scaled."""


def schema_of(op: Any) -> Any:
    """An op's schema (name, arguments, returns, is_mutable); None of a plain function."""
    return getattr(op, "_schema", None)


def base_name(op: OpOverload) -> str:
    """`addmm` of `aten.addmm.default`."""
    return str(op._schema.name).rpartition("::")[2]


def direct_call(op: Any) -> Callable[..., Any]:
    """An op without the Python call around it (1.4 instead of 1.7 us a small `neg`); a plain function as it is."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op is called with, by name, defaults filled in."""
    return {
        argument.name: args[position]
        if position < len(args)
        else kwargs.get(argument.name, argument.default_value)
        for position, argument in enumerate(schema_of(op).arguments)
    }
