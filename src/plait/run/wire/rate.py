"""How fast a socket has been, as the system knows it.

In: a socket. Out: bytes a second, or nothing where it is none of TCP, or has not had enough to send to show it.
"""

import socket
import struct

_INFO = struct.Struct("=7xB152xQ")
"""Of Linux's `tcp_info`: whether the rate is only what there was to send, and the rate at which bytes arrived."""


def bytes_per_s(made: socket.socket) -> float | None:
    """Of the newest bytes that waited for the network, not for who sends."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None or made.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        found = made.getsockopt(socket.IPPROTO_TCP, option, _INFO.size)
    except OSError:
        return None
    if len(found) < _INFO.size:  # an older system
        return None
    flags, rate = _INFO.unpack(found)
    return float(rate) if rate and not flags & 1 else None
