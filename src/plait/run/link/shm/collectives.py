"""Collectives of one group through shared memory, on flat tensors.

In: contiguous tensors. Out: tasks of the group's `Meeting`. Where every rank's tensor lies in memory that all can read
(`Arena.extend`), sums are made there, without a copy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.errors import RunError
from plait.run.link.shm import steps
from plait.run.link.shm.meeting import Meeting
from plait.run.link.shm.memory import Arena, Region
from plait.run.link.shm.rows import Rows, reduction
from plait.run.link.shm.task import Task

_PLACED_BYTES = 1 << 16
"""From this size on ranks tell each other where a tensor lies before they sum it: one more meeting, fewer copies."""

Then = Callable[[Task], Task | None]


class Collectives:
    """What one rank may ask of its group."""

    def __init__(
        self,
        meeting: Meeting,
        arenas: Sequence[Arena],
        buffers: Mapping[int, Region],
        *,
        settles: bool = False,
    ) -> None:
        """`buffers`: regions of this rank's arena by the address at which they start; `settles`: who is given what was
        gathered may change its own part at once, which others read where it lies."""
        self.meeting = meeting
        self._arenas = arenas
        self._buffers = buffers
        self._settles = settles
        self._ranks, self._own = meeting.ranks, meeting.own

    def barrier(self) -> Task:
        """Everybody waits for everybody."""
        return self._start(Task(kind="barrier", rows=steps.barrier(self._ranks, self._own)))

    def all_reduce(self, flat: Tensor, operation: str = "sum", then: Then | None = None) -> Task:
        """The sum of all tensors, in `flat`."""
        how, size = reduction(flat.dtype, operation), _bytes(flat)
        staged = Task(
            kind="all_reduce",
            rows=steps.all_reduce(self._ranks, self._own, size, how),
            given=[flat], taken=[flat], dtype=flat.dtype, operation=how.operation, num_bytes=size, then=then,
        )  # fmt: skip
        rows = steps.sum_in_place(self._ranks, self._own, size, how)
        return self._start_placed(flat, staged, rows, (size,) * self._ranks)

    def reduce(
        self, flat: Tensor, out: Tensor, root: int, operation: str = "sum", then: Then | None = None
    ) -> Task:
        """The sum of all tensors, in the root's `out`."""
        how, size = reduction(flat.dtype, operation), _bytes(flat)
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
        self,
        outs: Sequence[Tensor],
        flat: Tensor,
        root: int = -1,
        then: Then | None = None,
        sizes: tuple[int, ...] = (),
    ) -> Task:
        """Everybody's tensor, on all; with a root, on that rank alone. `sizes` in bytes where they differ."""
        sizes = sizes or (_bytes(flat),) * self._ranks
        staged = Task(
            kind="all_gather" if root < 0 else "gather",
            rows=steps.all_gather(self._ranks, self._own, sizes, root),
            given=[flat], taken=outs, dtype=flat.dtype, root=root, num_bytes=sum(sizes), then=then,
        )  # fmt: skip
        if root >= 0:
            return self._start(staged)
        is_there = outs[self._own].data_ptr() == flat.data_ptr()
        rows = steps.gather_in_place(self._ranks, self._own, sizes, is_there, self._settles)
        return self._start_placed(flat, staged, rows, sizes)

    def reduce_scatter(
        self,
        out: Tensor,
        pieces: Sequence[Tensor],
        operation: str = "sum",
        then: Then | None = None,
        whole: Tensor | None = None,
    ) -> Task:
        """Of as many pieces as there are ranks, the sum of one's own.

        `whole`, on all ranks or on none: the tensor of which they are the pieces. Where it lies in shared memory, `out`
        is its own piece, and the sum is made there.
        """
        how = reduction(out.dtype, operation)
        sizes = tuple(_bytes(piece) for piece in pieces)
        staged = Task(
            kind="reduce_scatter",
            rows=steps.reduce_scatter(self._ranks, self._own, sizes, how),
            given=pieces, taken=[out], dtype=out.dtype, operation=how.operation, num_bytes=sum(sizes), then=then,
        )  # fmt: skip
        if whole is None:
            return self._start(staged)
        rows = steps.sum_in_place(self._ranks, self._own, sum(sizes), how, sizes)
        return self._start_placed(whole, staged, rows, (sum(sizes),) * self._ranks)

    def halo(
        self,
        kind: str,
        up: Tensor,
        down: Tensor,
        before: Tensor,
        after: Tensor,
    ) -> Task:
        """`up` to the rank before and `down` to the next one; `before` and `after` are what they have sent."""
        rows = steps.halo(self._ranks, self._own, _bytes(up), _bytes(down))
        return self._start(
            Task(
                kind=kind,
                rows=rows,
                given=[up, down],
                taken=[before, after],
                dtype=up.dtype,
                num_bytes=_bytes(up) + _bytes(down),
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

    def _start_placed(self, flat: Tensor, staged: Task, rows: Rows, sizes: Sequence[int]) -> Task:
        """`rows` where all ranks' tensors, of these sizes, lie in memory that all can read, else `staged`."""
        if staged.num_bytes < _PLACED_BYTES:
            return self._start(staged)
        region = self._buffers.get(flat.untyped_storage().data_ptr())
        place = (0, 0, 0)
        if region is not None:
            place = (region.offset, region.size, int(flat.storage_offset()) * flat.element_size())

        def go_on(task: Task) -> Task:
            places = self.meeting.places(task)
            if not all(size for _, size, _ in places):
                return staged
            given = [
                arena.region(offset, whole).tensor(size, torch.uint8, start)
                for arena, size, (offset, whole, start) in zip(self._arenas, sizes, places, strict=True)
            ]
            return replace(staged, rows=rows, given=given)

        come = steps.come(self._ranks, self._own)
        return self._start(replace(staged, rows=come, given=(), taken=(), place=place, then=go_on))

    def _start(self, task: Task) -> Task:
        return self.meeting.start(task)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
