"""Which network interfaces a run may use.

In: the environment. Out: NCCL kept to the loopback interface on one host, unless the user has chosen otherwise, which
is then told; gloo, where it is measured beside our own links, always. Nothing else of a run listens: see `wire/`.
"""

import os
import sys
import warnings

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_CHOICES = ("NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "NCCL_IB_HCA")
"""What makes NCCL use other interfaces than the one we give it."""


def choose_interfaces(sharing: int | None = None) -> None:
    """Keep NCCL's own sockets on this host, or say that the environment does not.

    `sharing` is the number of a rank that shares its GPU with others, which NCCL allows between hosts only: such a rank
    says that it is on a host of its own.
    """
    if sharing is not None:
        os.environ["NCCL_HOSTID"] = f"plait-{sharing}"
    chosen = {name: os.environ[name] for name in _CHOICES if name in os.environ}
    if chosen:
        told = ", ".join(f"{name}={value}" for name, value in chosen.items())
        warnings.warn(f"the environment opens this run to other interfaces: {told}.", stacklevel=2)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _LOOPBACK)


def keep_gloo_here() -> None:
    """Have gloo listen for processes of this host alone, whatever the environment says: it takes anybody."""
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
