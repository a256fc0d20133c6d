"""Messages on a stream: a small JSON head, then bytes. Both are bounded before a byte of them is kept.

In: bytes in any pieces. Out: (head, body) one after the other. It never evaluates what it reads: JSON and raw bytes.
"""

import json
import struct
from typing import Any

from plait.errors import RunError

MOST_HEAD_BYTES = 1 << 20
"""Of a head that is believed: names and shapes of what follows."""
MOST_BODY_BYTES = 1 << 34
"""Of a body that is believed: 16 GiB, more than any bucket."""
_SIZES = struct.Struct("<IQ")


def pack(head: dict[str, Any], body: bytes | bytearray | memoryview = b"") -> bytes:
    """One message."""
    text = json.dumps(head).encode()
    check_sizes(len(text), len(body))
    return b"".join((_SIZES.pack(len(text), len(body)), text, body))


def check_sizes(head_bytes: int, body_bytes: int) -> None:
    """Refuse a message that nobody of ours would send."""
    if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
        raise RunError(
            f"a message of {head_bytes} + {body_bytes} bytes is over the limit, {MOST_HEAD_BYTES} + {MOST_BODY_BYTES}."
        )


class Incoming:
    """Puts messages together from the pieces in which a stream delivers them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> list[tuple[dict[str, Any], bytes]]:
        """The messages that are whole now."""
        self._bytes += piece
        found = []
        while len(self._bytes) >= _SIZES.size:
            head_bytes, body_bytes = _SIZES.unpack_from(self._bytes)
            check_sizes(head_bytes, body_bytes)
            end = _SIZES.size + head_bytes + body_bytes
            if len(self._bytes) < end:
                break
            head = parse(bytes(self._bytes[_SIZES.size : _SIZES.size + head_bytes]))
            found.append((head, bytes(self._bytes[_SIZES.size + head_bytes : end])))
            del self._bytes[:end]
        return found


def parse(text: bytes) -> dict[str, Any]:
    """A head; anything else than a JSON object is an error."""
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"a message is not JSON: {error}.") from error
    if not isinstance(head, dict):
        raise RunError(f"a message is a {type(head).__name__}, not an object.")
    return head
