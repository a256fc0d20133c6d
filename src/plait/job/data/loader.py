"""A rank's share of every micro-batch, read ahead in the background.

Goes in: a Source, the global order of samples, this rank's number. Comes out: one LoadedStep after another.
The position is the step number and nothing else: started at step k with any number of ranks, step k has the
same samples. Where ranks take what is next, `places` says which share of which step. Never drops or repeats a
sample, never moves data to a device, never leaves its thread behind.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from plait.errors import DataError
from plait.job.data.ahead import Ahead, fill
from plait.job.data.share import LoadedStep, Share
from plait.job.data.source import Source, Stream
from plait.job.order import SampleOrder, micro_batch_sizes, shares
from plait.job.origin import where
from plait.threads import start_thread

Rows = Callable[[Any, int, int], Any]
"""(batch, first sample, number of samples) -> these samples of it."""


class Loader:
    """Iterates over LoadedSteps; use it in a `with` block, or call close()."""

    def __init__(
        self,
        *,
        source: Source,
        order: SampleOrder | None,
        batch: int,
        accumulate: int = 1,
        rank: int = 0,
        ranks: int = 1,
        start_step: int = 0,
        stop_step: int | None = None,
        epochs: int | None = None,
        depth: int = 2,
        places: Iterable[tuple[int, int]] | None = None,
        rows: Rows | None = None,
    ) -> None:
        """Steps start_step up to, not including, stop_step, or to the end of the `epochs`-th pass over the data.

        `order` is None for a stream, which every rank walks from its start, keeping its own share. `places` are
        (step, share) in the order of steps, instead of this rank's share of every step; each is asked for when there
        is room for it, `depth` ahead. `rows`, where given, takes a share out of the whole micro-batch, which every rank
        then reads, so that all are padded alike.
        """
        assert 0 <= rank < ranks
        assert depth >= 1
        assert start_step >= 0
        cut = _Cut(accumulate=accumulate, ranks=ranks, rows=rows)
        wanted: Iterable[tuple[int, int]] = ((step, rank) for step in itertools.count(start_step))
        wanted = _below(stop_step, wanted if places is None else places)
        if isinstance(source, Stream):
            steps = _stream_steps(source, cut, batch, epochs, wanted)
        else:
            assert order is not None
            assert (order.batch, order.accumulate) == (batch, accumulate)
            steps = _ordered_steps(source, order, cut, epochs, wanted)
        self._ahead = Ahead(depth + 1 if places is None else depth)
        # The thread knows the buffer, not the loader: a loader that nobody holds any more is collected and closes it.
        self._thread = threading.Thread(
            target=fill, args=(self._ahead, steps), name="plait-loader", daemon=True
        )
        self._finalizer = weakref.finalize(self, self._ahead.close)

    def start(self) -> None:
        """Begin to read ahead; iterating does it too."""
        if self._thread.ident is None and not self._ahead.closed:
            start_thread(self._thread)

    def __iter__(self) -> Iterator[LoadedStep]:
        self.start()
        return self

    def __next__(self) -> LoadedStep:
        self.start()
        step = self._ahead.take(self._thread.is_alive)
        if step is None:
            raise StopIteration
        return step

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop reading ahead. A thread that is stuck in the user's dataset is left to end by itself after timeout_s."""
        self._finalizer()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """How a step is cut into shares."""

    accumulate: int
    ranks: int
    rows: Rows | None

    def of(
        self,
        step: int,
        share: int,
        epoch: int,
        ends_epoch: bool,
        ids: Tensor,
        items: Any,
        read: Callable[[Any], Any],
    ) -> LoadedStep:
        """The step, with one rank's shares: `read` makes a batch of a slice of `items`, one item a sample."""
        micro_batches = []
        begin = 0
        for size in micro_batch_sizes(len(ids), self.accumulate):
            sizes = shares(size, self.ranks)
            offset = sum(sizes[:share])
            first = begin + offset
            mine = ids[first : first + sizes[share]].tolist()
            try:
                if self.rows is None:
                    batch = read(items[first : first + len(mine)])
                else:
                    batch = self.rows(read(items[begin : begin + size]), offset, len(mine))
            except Exception as error:
                raise _named(error, step, mine) from error
            micro_batches.append(
                Share(batch=batch, ids=tuple(mine), sizes=sizes, offset=offset, global_offset=begin)
            )
            begin += size
        return LoadedStep(
            step=step,
            epoch=epoch,
            ends_epoch=ends_epoch,
            ids=ids,
            micro_batches=tuple(micro_batches),
            share=share,
        )


def _below(stop_step: int | None, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for step, share in places:
        if stop_step is not None and step >= stop_step:
            return
        yield step, share


def _ordered_steps(
    source: Source,
    order: SampleOrder,
    cut: _Cut,
    epochs: int | None,
    wanted: Iterable[tuple[int, int]],
) -> Iterator[LoadedStep]:
    per_epoch = order.num_steps_per_epoch
    for step, share in wanted:
        if epochs is not None and step >= epochs * per_epoch:
            return
        samples = order.at(step)
        ends_epoch = (step + 1) % per_epoch == 0
        yield cut.of(step, share, samples.epoch, ends_epoch, samples.ids, samples.ids, source.fetch)


def _stream_steps(
    source: Stream, cut: _Cut, batch: int, epochs: int | None, wanted: Iterator[tuple[int, int]]
) -> Iterator[LoadedStep]:
    step = 0
    position = next(wanted, None)
    for epoch in itertools.count() if epochs is None else range(epochs):
        begin = 0
        reader = _named_reader(source.samples(epoch), epoch)
        chunk = list(itertools.islice(reader, batch))
        if not chunk:
            raise DataError(
                f"the stream has 0 samples in epoch {epoch}.",
                fix="give data that can be read again from its start, or the function that makes it.",
            )
        while chunk:
            following = list(itertools.islice(reader, batch))
            while position is not None and position[0] == step:
                ids = torch.arange(begin, begin + len(chunk))
                yield cut.of(step, position[1], epoch, not following, ids, chunk, source.collate)
                position = next(wanted, None)
            if position is None:
                return
            step, begin, chunk = step + 1, begin + len(chunk), following


def _named_reader(samples: Iterator[Any], epoch: int) -> Iterator[Any]:
    """The same samples; an exception says which one could not be read."""
    for position in itertools.count():
        try:
            sample = next(samples)
        except StopIteration:
            return
        except Exception as error:
            raise DataError(
                f"sample {position} of epoch {epoch} of the stream failed{_at(error)}: {type(error).__name__}: {error}",
                fix="mend the data, or skip that sample in it.",
            ) from error
        yield sample


def _named(error: Exception, step: int, ids: list[int]) -> DataError:
    listed = ", ".join(map(str, ids[:8])) + (f", ... ({len(ids)} in all)" if len(ids) > 8 else "")
    samples = f"samples {listed}" if ids else "an empty share (made from sample 0)"
    reason = error.what if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
    fix = (
        error.fix
        if isinstance(error, DataError)
        else "mend the dataset or the collate function for these samples."
    )
    return DataError(f"step {step}: loading {samples} failed{_at(error)}: {reason}", fix=fix)


def _at(error: Exception) -> str:
    line = where(error)
    return f" at {line}" if line else ""
