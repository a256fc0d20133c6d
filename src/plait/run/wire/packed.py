"""Numbers of 32 bits in about 27, without losing one of them: for wires that take longer for the rest than processors.

In: float32 numbers as bytes. Out: fewer bytes, and the same numbers again. Those that travel together are of about one
size, so that of the eight bits of their exponents three will do (`core.c`), and zeros that lie together take next to
nothing; where they are of many sizes, they go as they are.
"""

import ctypes

import numpy as np

from plait.errors import RunError
from plait.run import native

LEAST_BYTES = 1 << 14
"""Of a message that is packed: a smaller one takes the wire no longer than a call."""
_BLOCK, _HEAD, _CODES = 256, 3, 96
"""Numbers of a block, and bytes of the first of its parts; as in core.c, which says how they lie."""
_FIXED = _HEAD + _CODES + 3 * _BLOCK
_NOTHING, _FAR, _EMPTY = 6, 7, 255
"""What codes stand for, and a head without a block; as in core.c."""


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
        head = [int(entry) for entry in data[at : at + _HEAD]]
        if not head or (head[0] and (len(head) < _HEAD or len(block) < _BLOCK)):
            return False
        most, shift, count = (head + [0] * _HEAD)[:_HEAD]
        size = 1 + block.nbytes if not most else _HEAD if shift == _EMPTY else _FIXED + (count + 1) // 2
        body = data[at : at + size]
        if len(body) < size:
            return False
        if not most:
            block[:] = np.frombuffer(body[1:].tobytes(), dtype=np.uint32)
        elif shift == _EMPTY:
            block[:] = 0
        elif not _unpack_block(body[_HEAD:], most, shift, count, block):
            return False
        at += size
    return at == len(data)


def _unpack_block(body: "np.ndarray", most: int, shift: int, count: int, block: "np.ndarray") -> bool:
    triples = body[:_CODES].reshape(-1, 3).astype(np.uint32)
    words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    codes = (words[:, None] >> np.arange(0, 24, 3, dtype=np.uint32) & 7).reshape(-1)
    low = np.frombuffer(body[_CODES : _CODES + 2 * _BLOCK].tobytes(), dtype=np.uint16).astype(np.uint32)
    high = body[_CODES + 2 * _BLOCK : _CODES + 3 * _BLOCK].astype(np.uint32)
    far = body[_CODES + 3 * _BLOCK :]
    depths = np.stack([far & 15, far >> 4], axis=1).reshape(-1)[:count].astype(np.int64)
    if int((codes == _FAR).sum()) != count:
        return False
    exponents = np.where(codes == _NOTHING, 0, most - shift - codes.astype(np.int64))
    exponents[codes == _FAR] = most - depths
    block[:] = high >> 7 << 31 | (exponents & 255).astype(np.uint32) << 23 | (high & 0x7F) << 16 | low
    return True
