"""Numbers of 32 bits in 28, without losing one of them: for wires that take longer for the rest than processors do.

In: float32 numbers as bytes. Out: fewer bytes, and the same numbers again. Those that travel together are of about one
size, so that of the eight bits of their exponents four will do (`core.c`); where they are not, they go as they are.
"""

import ctypes

import numpy as np

from plait.errors import RunError
from plait.run import native

LEAST_BYTES = 1 << 14
"""Of a message that is packed: a smaller one takes the wire no longer than a call."""
SLOW_BYTES_PER_S = 5e8
"""Below which a wire is slow: it takes longer for an eighth of the bytes than a processor for both ends' part."""
_BLOCK, _PACKED_BYTES, _NOTHING = 256, 896, 15
"""Numbers of a block, the bytes that they take, and what stands for an exponent of zero; as in core.c."""


def pack(data: memoryview) -> memoryview | None:
    """The same in fewer bytes; None where it cannot be, or nothing here is compiled."""
    library = native.compiled()
    if library is None or not hasattr(library, "plait_pack"):
        return None
    count = len(data) // 4
    numbers = np.frombuffer(data, dtype=np.uint8)
    out = np.empty(len(data) + count // _BLOCK + 1, dtype=np.uint8)
    size = _call(library.plait_pack, numbers, count, out)
    return out.data[:size] if size < len(data) else None


def unpack(packed: bytearray, room: memoryview) -> None:
    """The numbers, into room of just their size. What came is not trusted: it may be broken."""
    library, count = native.compiled(), len(room) // 4
    data, out = np.frombuffer(packed, dtype=np.uint8), np.frombuffer(room, dtype=np.uint8)
    if library is not None and hasattr(library, "plait_unpack"):
        is_whole = bool(_call(library.plait_unpack, data, len(data), out, count))
    else:
        is_whole = _unpack_here(data, out.view(np.uint32))
    if not is_whole:
        raise RunError(f"{len(packed):,} bytes that came are not {count:,} packed numbers.")


def _call(function: "ctypes._NamedFuncPointer", *given: "np.ndarray | int") -> int:
    function.restype = ctypes.c_int64
    found: int = function(
        *(
            ctypes.c_int64(entry) if isinstance(entry, int) else ctypes.c_void_p(entry.ctypes.data)
            for entry in given
        )
    )
    return found


def _unpack_here(data: "np.ndarray", out: "np.ndarray") -> bool:
    """Without a compiled core, block by block: slow, for hosts of which others have one."""
    at = 0
    for start in range(0, len(out), _BLOCK):
        block = out[start : start + _BLOCK]
        most = int(data[at]) if at < len(data) else 0
        size = _PACKED_BYTES if most else block.nbytes
        body = data[at + 1 : at + 1 + size]
        if len(body) < size or (most and len(block) < _BLOCK):
            return False
        block[:] = _block(body, most) if most else body.view(np.uint32)
        at += 1 + size
    return at == len(data)


def _block(body: "np.ndarray", most: int) -> "np.ndarray":
    pairs = np.zeros((_BLOCK // 2, 8), dtype=np.uint8)
    pairs[:, :7] = body.reshape(-1, 7)
    words = pairs.view(np.uint64)
    both = np.concatenate([words & 0xFFFFFFF, words >> 28 & 0xFFFFFFF], axis=1).reshape(-1).astype(np.uint32)
    code = both >> 23 & 15
    exponent = np.where(code == _NOTHING, 0, most - code.astype(np.int32)).astype(np.uint32) & 255
    return (both >> 27) << 31 | exponent << 23 | both & 0x7FFFFF
