"""The device that a rank computes on, and how exactly.

In: what the user asked for, and the rank. Out: a device, made this process's own.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from plait.errors import RunError, UsageError
from plait.plan.plan import Plan


def check_device(device: str) -> None:
    """Refuse a device that no machine, or this build of torch, has."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known.", fix="use cpu or cuda.")
    if device == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise UsageError(
            f"device cuda was asked for, but torch {torch.__version__} is built without it.",
            fix="use --device cpu, or install a CUDA build of torch.",
        )


def check_suits_device(plan: Plan, device: str) -> None:
    """Refuse links and graphs that this run cannot have."""
    transport = plan.links.transport
    if plan.links.by_hops and device != "cpu":
        raise UsageError(
            f"links.algorithm={plan.links.algorithm} is for processors; NCCL has algorithms of its own.",
            fix="use links.algorithm=backend.",
        )
    if transport == "nccl" and (device != "cuda" or plan.ranks != plan.mesh.size):
        why = f"plan {plan.name} has ranks without one" if device == "cuda" else "this run is on processors"
        raise UsageError(f"links.transport=nccl reaches GPUs only; {why}.", fix="use links.transport=auto.")
    if plan.graphs == "on" and (device != "cuda" or plan.num_stages > 1):
        why = (
            "this run is on processors"
            if device != "cuda"
            else "the stages of a pipeline wait for each other"
        )
        raise UsageError(f"graphs=on asks for CUDA graphs, but {why}.", fix="use graphs=auto.")
    if transport == "mpi":
        _check_mpi(plan, device)
    if transport == "shared" and device != "cpu":
        raise UsageError(
            "links.transport=shared is memory of processors; this run is on GPUs.",
            fix="use links.transport=auto.",
        )


def _check_mpi(plan: Plan, device: str) -> None:
    if device != "cpu" or plan.ranks != plan.mesh.size:
        why = "this run is on GPUs" if device != "cpu" else f"plan {plan.name} has servers"
        raise UsageError(
            f"links.transport=mpi is for ranks on processors that meet; {why}.",
            fix="use links.transport=auto.",
        )
    if find_spec("mpi4py") is None:
        raise UsageError("links.transport=mpi needs mpi4py.", fix="pip install plait[mpi].")


def choose_device(device: str, rank: int) -> torch.device:
    """The rank's device; ranks share GPUs where there are fewer than ranks."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RunError("device cuda was asked for, but torch sees no CUDA device.", fix="use --device cpu.")
    # Parameters are the user's own tensors: they are never moved into one piece, as cuDNN would like them.
    warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
    chosen = device_of(device, rank)
    torch.cuda.set_device(chosen)
    return chosen


def device_of(device: str, rank: int) -> torch.device:
    """The device of a rank, whichever is this process's own."""
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", rank % torch.cuda.device_count())


@contextmanager
def exact_products() -> Iterator[None]:
    """Without TF32, which rounds inputs to 10 bits: for comparing numbers, not for training."""
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend, allowed in zip(backends, before, strict=True):
            backend.allow_tf32 = allowed
