"""A backend of torch.distributed for processes of one host or of several: `dist.init_process_group("plait_shm")`.

In: CPU tensors of any program of torch's: DDP, FSDP2, hand-written. Out: what gloo gives, through memory that the
processes of a host share; every rank has the same bits. How the ranks reach each other is `local`'s affair, and
`hosts`' where they are on several hosts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import PlanError, RunError
from plait.run.link.backend.local import Ways
from plait.run.link.backend.work import Together
from plait.run.link.shm.memory import flat_of
from plait.run.link.shm.task import Task

BACKEND = "plait_shm"
_OPERATIONS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
)
"""Pairs, not a mapping: torch's operators compare, but have no equal hashes."""


class ShmGroup(dist.ProcessGroup):
    """The ranks of one group."""

    def __init__(self, rank: int, size: int, ways: Ways) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        self._own, self._size = rank, size
        self._ways, self._collectives = ways, ways.collectives

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """As torch names it; device meshes ask for it."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def shutdown(self) -> None:
        """As torch calls it when a group is destroyed."""
        self._ways.close()

    abort = shutdown

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in memory that all ranks of the group can read: sums of it are made where it lies."""
        return self._ways.empty(torch.Size(shape).numel(), dtype).view(tuple(shape))

    def _done(self, started: Any, outcome: Any, opts: Any, num_bytes: int) -> dist.Work:
        waits = opts is not None and not getattr(opts, "asyncOp", True)
        return self._ways.work(started, outcome, waits=waits, num_bytes=num_bytes)

    # What follows overrides torch's names.
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        flat = flat_of(tensor)
        task = self._collectives.all_reduce(flat, _operation(opts), _back([tensor], [flat]))
        return self._done(task, tensors, opts, flat.nbytes)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        task = self._collectives.all_reduce(flat, _operation(opts), _back(tensors, parts))
        return self._done(task, tensors, opts, flat.nbytes)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        flat, root = flat_of(tensor), opts.rootRank
        out = flat if self._own == root else flat[:0]
        back = _back([tensor], [flat]) if self._own == root else None
        return self._done(
            self._collectives.reduce(flat, out, root, _operation(opts), back), tensors, opts, flat.nbytes
        )

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        root = opts.rootRank if opts is not None else 0
        flat = flat_of(tensor)
        return self._done(
            self._collectives.broadcast(flat, root, _back([tensor], [flat])), tensors, opts, flat.nbytes
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        (outs,), (own,) = outputs, inputs
        rooms, flat = [flat_of(out, read=False) for out in outs], flat_of(own)
        self._check_sizes("all_gather", rooms, [flat] * self._size)
        return self._done(
            self._collectives.all_gather(rooms, flat, then=_back(outs, rooms)), outputs, opts, flat.nbytes
        )

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        room, flat = flat_of(output, read=False), flat_of(own)
        rooms = self._pieces("all_gather", room)
        self._check_sizes("all_gather", rooms, [flat] * self._size)
        return self._done(
            self._collectives.all_gather(rooms, flat, then=_back([output], [room])), output, opts, flat.nbytes
        )

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Together:
        works = [self._allgather_base(out, own) for out, own in zip(outputs, inputs, strict=True)]
        return Together(works, outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (out,), (pieces,) = outputs, inputs
        room, flats = flat_of(out, read=False), [flat_of(piece) for piece in pieces]
        self._check_sizes("reduce_scatter", [flats[self._own]], [room])
        task = self._collectives.reduce_scatter(room, flats, _operation(opts), _back([out], [room]))
        return self._done(task, outputs, opts, room.nbytes * self._size)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        room, flat = flat_of(output, read=False), flat_of(whole)
        pieces = self._pieces("reduce_scatter", flat)
        self._check_sizes("reduce_scatter", pieces, [room] * self._size)
        task = self._collectives.reduce_scatter(room, pieces, _operation(opts), _back([output], [room]))
        return self._done(task, output, opts, flat.nbytes)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Together:
        works = [
            self._reduce_scatter_base(out, whole, opts) for out, whole in zip(outputs, inputs, strict=True)
        ]
        return Together(works, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (own,), outs = inputs, outputs[0] if outputs else []
        rooms, flat = [flat_of(out, read=False) for out in outs], flat_of(own)
        if self._own == opts.rootRank:
            self._check_sizes("gather", rooms, [flat] * self._size)
        task = self._collectives.all_gather(rooms, flat, opts.rootRank, _back(outs, rooms))
        return self._done(task, outputs, opts, flat.nbytes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        (out,), pieces = outputs, inputs[0] if inputs else []
        room, flats = flat_of(out, read=False), [flat_of(piece) for piece in pieces]
        if self._own == opts.rootRank:
            self._check_sizes("scatter", flats, [room] * self._size)
        task = self._collectives.scatter(room, flats, opts.rootRank, _back([out], [room]))
        return self._done(task, outputs, opts, room.nbytes)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        rooms, flats = [flat_of(out, read=False) for out in outputs], [flat_of(piece) for piece in inputs]
        task = self._collectives.all_to_all(rooms, flats, _back(outputs, rooms))
        return self._done(task, outputs, opts, 0)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        room, flat = flat_of(output, read=False), flat_of(given)
        rooms = _split("all_to_all", output, room, output_splits, self._size)
        pieces = _split("all_to_all", given, flat, input_splits, self._size)
        return self._done(
            self._collectives.all_to_all(rooms, pieces, _back([output], [room])), output, opts, 0
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._done(self._collectives.barrier(), [], opts, 0)

    def send(self, tensors: Any, to: int, tag: int) -> dist.Work:
        return self._ways.send(tensors[0], to, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> dist.Work:
        return self._ways.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        return self._ways.receive(tensors[0], None, tag)

    # As torch has called them since 2.13.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def _pieces(self, what: str, flat: Tensor) -> list[Tensor]:
        if flat.numel() % self._size:
            raise _wrong(what, f"{flat.numel():,} elements cannot be cut into {self._size} equal pieces")
        return list(flat.view(self._size, -1))

    def _check_sizes(self, what: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        if len(found) != len(wanted):
            raise _wrong(what, f"{len(found)} tensors were given for {len(wanted)} ranks")
        for rank, (tensor, like) in enumerate(zip(found, wanted, strict=True)):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise _wrong(
                    what,
                    f"the tensor of rank {rank} has {tensor.numel():,} elements of {tensor.dtype} where "
                    f"{like.numel():,} of {like.dtype} are needed",
                )


def _operation(opts: Any) -> str:
    op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
    found = next((name for known, name in _OPERATIONS if op == known), None)
    if found is None:
        raise PlanError(
            f"{BACKEND} does not know {opts.reduceOp.op.name}.", fix="use a sum, mean, product, min or max."
        )
    return found


def _back(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> Callable[[Task], None] | None:
    """Copies results to where they were asked for, unless they are there."""
    apart = [(t, flat) for t, flat in zip(tensors, flats, strict=True) if t.data_ptr() != flat.data_ptr()]
    if not apart:
        return None

    def then(_: Task) -> None:
        with torch.no_grad():
            for tensor, flat in apart:
                tensor.copy_(flat.view(tensor.shape))

    return then


def _split(what: str, tensor: Tensor, flat: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
    """A tensor's rows for each rank, flat."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % ranks:
            raise _wrong(what, f"{rows} rows cannot be cut into {ranks} equal pieces")
        splits = [rows // ranks] * ranks
    if sum(splits) != rows or len(splits) != ranks:
        raise _wrong(what, f"splits {list(splits)} do not cut {rows} rows for {ranks} ranks")
    row = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [count * row for count in splits]))


def _wrong(what: str, why: str) -> RunError:
    return RunError(f"{what}: {why}.", fix="give tensors whose sizes and dtypes fit.")
