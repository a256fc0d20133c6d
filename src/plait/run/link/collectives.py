"""Collectives of one group through shared memory, on flat tensors.

In: contiguous tensors. Out: tasks of the group's `Meeting`. Where every rank's tensor lies in memory that all can read
(`Arena.extend`), sums are made there, without a copy.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from plait.errors import RunError
from plait.run.link import steps
from plait.run.link.meeting import Meeting, Task
from plait.run.link.shared_memory import Arena, Region

_PLACED_BYTES = 1 << 16
"""From this size on ranks tell each other where a tensor lies before they sum it: one more meeting, fewer copies."""

Then = Callable[[Task], Task | None]


class Collectives:
    """What one rank may ask of its group."""

    def __init__(self, meeting: Meeting, arenas: Sequence[Arena], buffers: Mapping[int, Region]) -> None:
        """`buffers`: regions of this rank's arena by the address at which they start."""
        self.meeting = meeting
        self._arenas = arenas
        self._buffers = buffers
        self._ranks, self._own = meeting.ranks, meeting.own

    def barrier(self) -> Task:
        """Everybody waits for everybody."""
        return self._start(Task(kind="barrier", rows=steps.barrier(self._ranks, self._own)))

    def all_reduce(self, flat: Tensor, operation: str = "sum", then: Then | None = None) -> Task:
        """The sum of all tensors, in `flat`."""
        how, size = steps.reduction(flat.dtype, operation), _bytes(flat)
        staged = Task(
            kind="all_reduce",
            rows=steps.all_reduce(self._ranks, self._own, size, how),
            given=[flat], taken=[flat], dtype=flat.dtype, operation=how.operation, num_bytes=size, then=then,
        )  # fmt: skip
        if size < _PLACED_BYTES:
            return self._start(staged)
        rows = steps.sum_in_place(self._ranks, self._own, size, how)
        return self._start(self._where_it_lies(flat, staged, "all_reduce in shared memory", rows))

    def reduce(
        self, flat: Tensor, out: Tensor, root: int, operation: str = "sum", then: Then | None = None
    ) -> Task:
        """The sum of all tensors, in the root's `out`."""
        how, size = steps.reduction(flat.dtype, operation), _bytes(flat)
        return self._start(
            Task(
                kind="reduce",
                rows=steps.all_reduce(self._ranks, self._own, size, how, root),
                given=[flat],
                taken=[out],
                dtype=flat.dtype,
                operation=how.operation,
                root=root,
                num_bytes=size,
                then=then,
            )
        )

    def broadcast(self, flat: Tensor, root: int, then: Then | None = None) -> Task:
        """The root's tensor, on all."""
        rows = steps.broadcast(self._ranks, self._own, _bytes(flat), root)
        return self._start(
            Task(
                kind="broadcast",
                rows=rows,
                given=[flat],
                taken=[flat],
                dtype=flat.dtype,
                root=root,
                num_bytes=_bytes(flat),
                then=then,
            )
        )

    def all_gather(
        self, outs: Sequence[Tensor], flat: Tensor, root: int = -1, then: Then | None = None
    ) -> Task:
        """Everybody's tensor, on all; with a root, on that rank alone. All have the size of `flat`."""
        rows = steps.all_gather(self._ranks, self._own, (_bytes(flat),) * self._ranks, root)
        kind = "all_gather" if root < 0 else "gather"
        return self._start(
            Task(
                kind=kind,
                rows=rows,
                given=[flat],
                taken=outs,
                dtype=flat.dtype,
                root=root,
                num_bytes=_bytes(flat),
                then=then,
            )
        )

    def reduce_scatter(
        self, out: Tensor, pieces: Sequence[Tensor], operation: str = "sum", then: Then | None = None
    ) -> Task:
        """Of as many pieces as there are ranks, the sum of one's own."""
        how = steps.reduction(out.dtype, operation)
        sizes = tuple(_bytes(piece) for piece in pieces)
        return self._start(
            Task(
                kind="reduce_scatter",
                rows=steps.reduce_scatter(self._ranks, self._own, sizes, how),
                given=pieces,
                taken=[out],
                dtype=out.dtype,
                operation=how.operation,
                num_bytes=sum(sizes),
                then=then,
            )
        )

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int, then: Then | None = None) -> Task:
        """To each rank its piece of what the root has."""
        rows = steps.scatter(self._ranks, self._own, _bytes(out), root)
        taken = [out if rank == root else out[:0] for rank in range(self._ranks)]
        return self._start(
            Task(
                kind="scatter",
                rows=rows,
                given=pieces,
                taken=taken,
                dtype=out.dtype,
                root=root,
                num_bytes=_bytes(out),
                then=then,
            )
        )

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], then: Then | None = None) -> Task:
        """A tensor from every rank to every other, of any sizes: they tell each other the sizes first."""
        own = torch.tensor([_bytes(piece) for piece in pieces])
        told = torch.empty(self._ranks, self._ranks, dtype=torch.int64)

        def exchange(_: Task) -> Task:
            sizes = told.tolist()
            for rank, out in enumerate(outs):
                if sizes[rank][self._own] != _bytes(out):
                    raise RunError(
                        f"all_to_all: rank {rank} of the group sends {sizes[rank][self._own]:,} bytes to "
                        f"rank {self._own}, which expects {_bytes(out):,}.",
                        fix="give both ranks the same split sizes.",
                    )
            rows = steps.all_to_all(self._ranks, self._own, tuple(map(tuple, sizes)))
            return Task(
                kind="all_to_all", rows=rows, given=pieces, taken=outs, dtype=outs[0].dtype, then=then
            )

        rows = steps.all_gather(self._ranks, self._own, (8 * self._ranks,) * self._ranks)
        return self._start(
            Task(
                kind="all_to_all",
                rows=rows,
                given=[own],
                taken=list(told),
                dtype=outs[0].dtype,
                then=exchange,
            )
        )

    def _where_it_lies(self, flat: Tensor, staged: Task, kind: str, rows: steps.Rows) -> Task:
        """A meeting at which all tell where their tensors lie; what follows depends on that."""
        region = self._buffers.get(flat.untyped_storage().data_ptr())
        place = (0, 0, 0)
        if region is not None:
            place = (region.offset, region.size, int(flat.storage_offset()) * flat.element_size())

        def go_on(task: Task) -> Task:
            places = self.meeting.places(task)
            if not all(size for _, size, _ in places):
                return staged
            given = [
                arena.region(offset, size).tensor(_bytes(flat), torch.uint8, start)
                for arena, (offset, size, start) in zip(self._arenas, places, strict=True)
            ]
            return Task(
                kind=kind, rows=rows, given=given, dtype=flat.dtype, operation=staged.operation,
                num_bytes=_bytes(flat), then=staged.then,
            )  # fmt: skip

        return Task(
            kind=staged.kind, rows=steps.barrier(self._ranks, self._own), dtype=staged.dtype,
            operation=staged.operation, num_bytes=staged.num_bytes, place=place, then=go_on,
        )  # fmt: skip

    def _start(self, task: Task) -> Task:
        return self.meeting.start(task)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
