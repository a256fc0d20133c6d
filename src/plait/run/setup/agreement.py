"""Ranks must start from the same: a difference is found before the first step, not by a wrong result.

In: what a rank has, as a digest. Out: nothing, or an error on every rank that names the first one that differs.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plait.errors import EchoError, RunError
from plait.run.wire.tell import tell
from plait.torch_private.wrappers import parts_of


def check_agreement(
    what: str, digest: Callable[[], str], ranks: int, told_by: Callable[[], bool] = lambda: True
) -> None:
    """Compare digests over all ranks; all of them must call it. One alone makes none: it takes a minute for 30 GB.

    `told_by`: whether this rank says what is wrong.
    """
    if ranks == 1:
        return
    found = tell(digest())
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different and not told_by():
        raise EchoError(f"rank 0 has told that the {what} of ranks differ.")
    if different:
        raise RunError(
            f"the {what} of rank {different[0]} and rank 0 differ.",
            fix="give all ranks the same job and plan, whose model and data depend on the job's seed alone (no time, "
            "hostname or os.urandom).",
        )


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names and values, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode())
        for part in parts_of(tensor.detach()):
            value = part.cpu().contiguous()
            digest.update(value.reshape(-1).view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
