"""Which network interfaces a run may use, and what memory NCCL knows beforehand.

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


def register_buffers() -> None:
    """Have NCCL register device memory once, when torch takes it, and not at every collective.

    Torch refuses that for segments that grow; who has chosen those keeps them, as who has decided otherwise.
    """
    allocator = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not any("expandable_segments:True" in chosen for chosen in allocator):
        os.environ.setdefault("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")


def keep_gloo_here() -> None:
    """Have gloo listen for processes of this host alone, whatever the environment says: it takes anybody."""
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
