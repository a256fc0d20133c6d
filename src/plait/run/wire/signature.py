"""What a message belongs to, as a number that travels with it: so that ranks which do not do the same are told.

In: an operation, how it reduces, a dtype. Out: a number; and of a number, words for people.
"""

import torch

_OPERATIONS = ("bytes", "message", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
_REDUCED = ("", "sum", "avg", "max", "min", "product")
_DTYPES = tuple(
    dict.fromkeys(kind for _, kind in sorted(vars(torch).items()) if isinstance(kind, torch.dtype))
)
"""In an order that ranks with the same torch share."""

ANY = 0
"""Bytes of which only the size is compared."""
PACKED = 1 << 31
"""Bit of a message whose numbers come in fewer bytes (`packed.py`), and of room for one that may."""


def signature(operation: str, dtype: torch.dtype, reduced: str = "") -> int:
    """The number."""
    return _OPERATIONS.index(operation) << 16 | _REDUCED.index(reduced) << 12 | (1 + _DTYPES.index(dtype))


def told(number: int, num_bytes: int) -> str:
    """For people."""
    number &= ~PACKED
    operation, reduced, dtype = number >> 16, number >> 12 & 15, number & 0xFFF
    known = operation < len(_OPERATIONS) and reduced < len(_REDUCED) and dtype <= len(_DTYPES)
    if not known or not dtype:
        return f"{num_bytes:,} bytes"
    about = ", ".join(word for word in (_REDUCED[reduced], str(_DTYPES[dtype - 1])) if word)
    return f"{_OPERATIONS[operation]} ({about}) of {num_bytes:,} bytes"
