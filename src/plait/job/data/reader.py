"""How a step is cut into shares, and how a share is read: in this thread, or by workers.

Goes in: the ids of a step, or a stream's samples; a Source. Comes out: LoadedSteps with one rank's batches. Never
decides which samples a step has.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from plait.errors import DataError
from plait.job.batch import no_rows
from plait.job.data.share import LoadedStep, Share
from plait.job.data.source import Source, Stream
from plait.job.data.workers import Pool
from plait.job.generators import seed_for
from plait.job.order import SampleOrder, micro_batch_sizes, shares
from plait.job.origin import RAISED, where

Rows = Callable[[Any, int, int], Any]
"""(batch, first sample, number of samples) -> these samples of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outline:
    """A step before its samples are read."""

    step: LoadedStep
    """Its shares have no batches yet."""
    samples: tuple[Any, ...] = ()
    """Of a stream: those of the whole step."""

    def requests(self) -> list["_Request"]:
        return [_Request(step=self.step.step, epoch=self.step.epoch, share=share,
                         ids=self.step.ids[share.global_offset : share.global_offset + sum(share.sizes)].tolist())
                for share in self.step.micro_batches]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    """One share to read."""

    step: int
    epoch: int
    share: Share
    ids: list[int]
    """All samples of its micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a step is cut into shares."""

    accumulate: int
    ranks: int
    rows: Rows | None
    whole: bool = False
    """Whether a share has the samples of all ranks."""

    def outline(
        self, step: int, share: int, epoch: int, ends_epoch: bool, ids: Tensor, samples: tuple[Any, ...] = ()
    ) -> Outline:
        """The step with one rank's shares, still to be read."""
        micro_batches, begin = [], 0
        for size in micro_batch_sizes(len(ids), self.accumulate):
            sizes = shares(size, self.ranks)
            offset = sum(sizes[:share])
            mine = ids[begin + offset : begin + (size if self.whole else offset + sizes[share])].tolist()
            micro_batches.append(
                Share(batch=None, ids=tuple(mine), sizes=sizes, offset=offset, global_offset=begin)
            )
            begin += size
        step_ = LoadedStep(
            step=step, epoch=epoch, ends_epoch=ends_epoch, ids=ids, micro_batches=tuple(micro_batches), share=share
        )  # fmt: skip
        return Outline(step=step_, samples=samples)

    def read(self, share: Share, read: Callable[[int, int], Any]) -> Any:
        """The batch of a share; `read` makes one of the samples from a first to a last of its micro-batch."""
        first, count = share.offset, len(share.ids)
        if sum(share.sizes) == 1 and count == 0:  # padded as on the rank that has the only sample
            return no_rows(read(0, 1))
        if self.rows is None:
            return read(first, first + count)
        return self.rows(read(0, sum(share.sizes)), first, count)


class Reader:
    """Reads the shares of steps, here or in workers."""

    def __init__(self, source: Source, order: SampleOrder | None, cut: Cut) -> None:
        self.cut = cut
        self._source, self._seed = source, 0 if order is None else order.seed

    def filled(self, outline: Outline) -> LoadedStep:
        """The step, read in this thread."""
        read = self._fetched if not outline.samples else self._collated
        done = []
        for request in outline.requests():
            begin = request.share.global_offset
            items = outline.samples[begin : begin + len(request.ids)] or request.ids
            try:
                batch = self.cut.read(request.share, lambda first, last, items=items: read(items[first:last]))  # type: ignore[misc]
            except RAISED as error:
                raise _named(error, request) from error
            done.append(replace(request.share, batch=batch))
        return replace(outline.step, micro_batches=tuple(done))

    def _fetched(self, ids: Any) -> Any:
        return self._source.fetch(torch.tensor(ids, dtype=torch.int64))

    def _collated(self, samples: Any) -> Any:
        assert isinstance(self._source, Stream)
        return self._source.collate(samples)

    def in_worker(self, request: _Request) -> tuple[Any, dict[int, str]]:
        """The batch of a share and the damaged samples that were met; random draws are those of each sample."""
        self._source.before = lambda index: seed_for(f"{self._seed}:{request.epoch}:{index}")
        try:
            batch = self.cut.read(request.share, lambda first, last: self._fetched(request.ids[first:last]))
        except RAISED as error:
            raise _named(error, request) from error
        return batch, self._source.news()

    def by(self, pool: Pool, outlines: Iterator[Outline], ahead: int) -> Iterator[LoadedStep]:
        """The steps, read by workers."""
        waiting: deque[LoadedStep] = deque()
        done: list[Share] = []

        def requests() -> Iterator[_Request]:
            for outline in outlines:
                waiting.append(outline.step)
                yield from outline.requests()

        with contextlib.suppress(EOFError):
            for batch, damaged in pool.ordered(requests(), ahead):
                if self._source.damage is not None:
                    self._source.damage.add(damaged)
                done.append(replace(waiting[0].micro_batches[len(done)], batch=batch))
                if len(done) == len(waiting[0].micro_batches):
                    yield replace(waiting.popleft(), micro_batches=tuple(done))
                    done = []


def _named(error: BaseException, request: _Request) -> DataError:
    ids = request.share.ids
    listed = ", ".join(map(str, ids[:8])) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
    samples = f"samples {listed}" if ids else "an empty share (made from sample 0)"
    reason = error.what if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    fix = (
        error.fix
        if isinstance(error, DataError)
        else "mend the dataset or the collate function for these samples."
    )
    return DataError(f"step {request.step + 1}: loading {samples} failed{_at(error)}: {reason}", fix=fix)


def _at(error: BaseException) -> str:
    line = where(error)
    return f" at {line}" if line else ""
