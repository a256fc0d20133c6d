"""Horovod's names over plait's own sockets: `import plait.horovod as hvd` in a script that was written for Horovod.

In: processes that torchrun, srun or mpirun started, one a rank; or one alone. Out: Horovod's functions for PyTorch.
Sums are made in the order of ranks, so all ranks have the same bits. Collectives must be called in one order on all
ranks, as they must in torch; nothing is pickled, so objects that are told are of JSON and tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import UsageError
from plait.run.link.shm.memory import host
from plait.run.own_loop import gathered
from plait.run.start.launch import disconnect
from plait.run.start.party import TIMEOUT_S, meet
from plait.run.wire.tell import tell

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

Op = Literal["average", "sum", "adasum"]
Average: Op = "average"
Sum: Op = "sum"
Adasum: Op = "adasum"
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32)
_JOIN, _REDUCE = 0, 1
"""What a rank comes to a meeting for: nothing more comes from it, or a sum."""
_here: dict[str, Any] = {}
"""What `init` found: the hosts of all ranks."""


_NOT_HERE = {
    "elastic": "train with `plait run --elastic 2:4`, or `plait.train(..., elastic=...)`: ranks may then be lost.",
    "SyncBatchNorm": "train with `plait.train`: under every plan batch norm is over the whole batch.",
}
"""Names of Horovod's that are done otherwise here."""


def __getattr__(name: str) -> Any:
    fix = _NOT_HERE.get(name, f"what there is: {', '.join(__all__)}.")
    raise AttributeError(f"plait.horovod has no {name}. Fix: {fix}")


def _refuse(**options: Any) -> None:
    """Options that would change a result, and that nobody here heeds."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"{name}={value!r} is not known to plait.horovod: all ranks take part in everything.",
                fix=f"leave {name} out.",
            )


class Compression:
    """How gradients travel."""

    none: torch.dtype | None = None
    fp16: torch.dtype | None = torch.float16


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Meet the other ranks; does nothing the second time."""
    _refuse(comm=comm, process_sets=process_sets)
    if "hosts" in _here:
        return
    if not dist.is_initialized():
        meet("plait", TIMEOUT_S)
    _here["hosts"] = [str(told) for told in tell(host())] if dist.is_initialized() else [host()]


def shutdown() -> None:
    """Leave the others."""
    _here.clear()
    disconnect()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return "hosts" in _here


def _hosts() -> list[str]:
    if "hosts" not in _here:
        raise UsageError("plait.horovod has not been initialized.", fix="call hvd.init() first.")
    found: list[str] = _here["hosts"]
    return found


def size() -> int:
    """How many ranks there are."""
    return len(_hosts())


def rank() -> int:
    """This one."""
    return dist.get_rank() if size() > 1 else 0


def local_size() -> int:
    """How many are on this host."""
    return _hosts().count(_hosts()[rank()])


def local_rank() -> int:
    """Which of those this is."""
    return _hosts()[: rank()].count(_hosts()[rank()])


def _meet(kind: int, tensor: Tensor | None, waited: int = 0) -> list[list[int]]:
    """What every rank has come for: kind, elements (of one that has joined: its meetings since), dtype."""
    known = [kind, waited, 0] if tensor is None else [kind, tensor.numel(), _DTYPES.index(tensor.dtype)]
    own = torch.tensor(known)
    found = [torch.empty_like(own) for _ in range(size())]
    dist.all_gather(found, own)
    return [entry.tolist() for entry in found]


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: Op | None = None
) -> Tensor:
    """The mean (or `op=Sum`) over all ranks, in place."""
    wanted = op if op is not None else Average if average is not False else Sum
    if wanted == Adasum:
        raise _no_adasum()
    if tensor.dtype not in _DTYPES:
        raise UsageError(f"tensors of {tensor.dtype} cannot be reduced.", fix="use float32.")
    if size() > 1:
        if any(entry[0] == _REDUCE and entry[1] != tensor.numel() for entry in _meet(_REDUCE, tensor)):
            raise UsageError(
                f"ranks reduce tensors of different sizes; rank {rank()} has {tensor.numel()} elements.",
                fix="call the same collectives in the same order on all ranks.",
            )
        dist.all_reduce(tensor)
        if wanted == Average:
            _divide(tensor, size())
    return tensor


def _no_adasum() -> UsageError:
    return UsageError("Adasum is not known here.", fix="use op=hvd.Average or op=hvd.Sum.")


def _divide(tensor: Tensor, count: int) -> None:
    if tensor.is_floating_point():
        tensor /= count
    else:
        tensor.copy_(torch.div(tensor, count, rounding_mode="floor"))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: torch.dtype | None = None,
    op: Op | None = None,
) -> Tensor:
    """The mean (or `op=Sum`) over all ranks; `compression` is for floats."""
    short = compression is not None and tensor.is_floating_point()
    sent = tensor.detach().to(compression, copy=True) if short else tensor.detach().clone()
    return allreduce_(sent, average, name, op).to(tensor.dtype)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """The tensors of all ranks one after the other along dim 0, in which they may differ."""
    return gathered(tensor)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The root's values, in place."""
    if size() > 1:
        with torch.no_grad():
            dist.broadcast(tensor.detach(), root_rank)
    return tensor


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """The root's values."""
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_object(value: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """What the root has: JSON and tensors; tuples come back as lists."""
    return value if size() == 1 else tell(value if rank() == root_rank else None)[root_rank]


def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0
) -> None:
    """Give all ranks the root's values of a `state_dict` or of `named_parameters`."""
    entries = parameters.items() if isinstance(parameters, Mapping) else parameters
    for _, value in sorted(entries, key=lambda entry: entry[0]):
        if isinstance(value, Tensor):
            broadcast_(value, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the root's state and settings of an optimizer."""
    if size() == 1:
        return
    known = optimizer.state_dict()
    told = {
        "state": {str(key): entry for key, entry in known["state"].items()},
        "groups": known["param_groups"],
    }
    found = broadcast_object(told, root_rank)
    groups = [
        {name: tuple(value) if isinstance(own.get(name), tuple) else value for name, value in group.items()}
        for group, own in zip(found["groups"], known["param_groups"], strict=True)
    ]
    state = {int(key): entry for key, entry in found["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def join(device: int = -1) -> int:
    """This rank has no more data: it takes part in the sums of the others with zeros until all have none.

    Returns the last rank that came here.
    """
    waited = 0
    while size() > 1:
        wanted = _meet(_JOIN, None, waited)
        at_work = [entry for entry in wanted if entry[0] != _JOIN]
        if not at_work:
            least = min(entry[1] for entry in wanted)
            return max(index for index, entry in enumerate(wanted) if entry[1] == least)
        dist.all_reduce(torch.zeros(at_work[0][1], dtype=_DTYPES[at_work[0][2]]))
        waited += 1
    return 0


class _Distributed:
    """What `DistributedOptimizer` adds to the class of an optimizer."""

    _settings: tuple[Op, torch.dtype | None, float]
    _skips: bool
    param_groups: list[dict[str, Any]]

    def synchronize(self) -> None:
        """Make every gradient the mean over all ranks: one message for each dtype."""
        op, compression, _ = self._settings
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            flat = allreduce(flat, op=op, compression=compression)
            parts = flat.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` does not synchronize, after `synchronize` was called: for clipping."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Any = None) -> Any:
        """Average gradients, then step."""
        if not self._skips:
            with torch.no_grad():
                self.synchronize()
        return super().step(closure)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: torch.dtype | None = None,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = None,
) -> Any:
    """The optimizer with gradients that are means over all ranks; gradients of several backward passes add up.

    What Horovod takes to send gradients in other lots, or to divide them earlier, changes nothing here.
    """
    del (
        named_parameters,
        backward_passes_per_step,
        gradient_predivide_factor,
        num_groups,
        groups,
        sparse_as_dense,
    )
    _refuse(process_set=process_set)
    if op == Adasum:
        raise _no_adasum()
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {})
    made: Any = optimizer
    made._settings = (op, compression, 1.0)
    made._skips = False
    return made
