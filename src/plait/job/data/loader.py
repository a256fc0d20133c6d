"""A rank's share of every micro-batch, read ahead in the background.

Goes in: a Source, the global order of samples, this rank's number. Comes out: one LoadedStep after another.
The position is the step number and nothing else: started at step k with any number of ranks, step k has the
same samples. Where ranks take what is next, `places` says which share of which step. With `workers`, processes read
what can be fetched by id; what a dataset draws there depends on seed, epoch and sample alone. Never drops or repeats a
sample, never moves data to a device, never leaves its thread or its workers behind.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch

from plait.errors import DataError
from plait.job.batch import map_tensors
from plait.job.data.ahead import Ahead, fill
from plait.job.data.reader import Cut, Outline, Reader, Rows
from plait.job.data.share import LoadedStep
from plait.job.data.source import Source, Stream
from plait.job.data.workers import Pool
from plait.job.order import EACH, Draws, SampleOrder
from plait.threads import start_thread
from plait.torch_private.workers import become_worker


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
        workers: int = 0,
        pin: bool = False,
        draws: Draws = EACH,
        whole: bool = False,
        worker_init: Callable[[int], Any] | None = None,
    ) -> None:
        """Steps start_step up to, not including, stop_step, or to the end of the `epochs`-th pass over the data.

        `order` is None for a stream, which every rank walks from its start, keeping its own share of the batches that
        steps have by `draws`. `places` are
        (step, share) in the order of steps, instead of this rank's share of every step; each is asked for when there
        is room for it, `depth` ahead. `rows`, where given, takes a share out of the whole micro-batch, which every rank
        then reads, so that all are padded alike. Each of `workers` processes has up to `depth` shares to read; `pin`
        puts tensors where a GPU can fetch them from by itself. With `depth` 0 nothing is read ahead: a step is read
        when it is asked for, in the thread that asks. `whole`: this process reads for all ranks, whose shares
        the samples are cut into later. `worker_init` is called in each worker, with its number, before it reads.
        """
        assert 0 <= rank < ranks
        assert depth >= (1 if workers or places is not None else 0)
        assert start_step >= 0
        wanted: Iterable[tuple[int, int]] = ((step, rank) for step in itertools.count(start_step))
        wanted = _below(stop_step, wanted if places is None else places)
        self._order, self._steps = order if places is None else None, itertools.count(start_step)
        self._epochs = epochs
        self._reader = Reader(source, order, Cut(accumulate=accumulate, ranks=ranks, rows=rows, whole=whole))
        self._begin = partial(_begin, workers, order.seed if order is not None else 0, source, worker_init)
        self._workers, self._depth = (0 if isinstance(source, Stream) else workers), depth
        if isinstance(source, Stream):
            self._outlines = _stream_steps(source, self._reader, batch, epochs, wanted, draws)
        else:
            assert order is not None
            assert (order.batch, order.accumulate) == (batch, accumulate)
            self._outlines = _ordered_steps(order, self._reader.cut, epochs, wanted)
        self._ahead = Ahead(depth + 1 if places is None else depth)
        self._num_ahead, self._pin = (depth + 1 if places is None else depth), pin
        self._pool: list[Pool] = []
        self._thread: threading.Thread | None = None
        self._read: Iterator[LoadedStep] | None = (
            map(self._reader.filled, self._outlines) if not depth else None
        )
        # The thread knows the buffer, not the loader: a loader that nobody holds any more is collected and closes it.
        self._finalizer = weakref.finalize(self, _close, self._ahead, self._pool)

    def start(self) -> None:
        """Begin to read ahead; iterating does it too. Workers live as long as the thread that calls this."""
        if self._thread is not None or self._ahead.closed or self._read is not None:
            return
        for _ in range(self._num_ahead):
            self._order_next()
        if self._workers:
            self._pool.append(Pool(self._reader.in_worker, self._workers, self._begin))
            steps = self._reader.by(self._pool[0], self._outlines, self._depth)
        else:
            steps = map(self._reader.filled, self._outlines)
        if self._pin:
            steps = map(_pinned, steps)
        self._thread = threading.Thread(
            target=fill, args=(self._ahead, steps), name="plait-loader", daemon=True
        )
        start_thread(self._thread)

    def _order_next(self) -> None:
        """Have the order of an epoch before the thread needs it: a user's sampler draws in the thread of the user."""
        step = next(self._steps)
        if self._order is not None and (self._epochs is None or step < self._order.first_step(self._epochs)):
            self._order.at(step)

    def __iter__(self) -> Iterator[LoadedStep]:
        self.start()
        return self

    def __next__(self) -> LoadedStep:
        self.start()
        if self._read is not None:
            if self._ahead.closed:
                raise StopIteration
            return next(self._read)
        self._order_next()
        step = self._ahead.take(lambda: self._thread is not None and self._thread.is_alive())
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
        if self._thread is not None:
            self._thread.join(timeout_s)


def _begin(
    workers: int, seed: int, source: Source, worker_init: Callable[[int], Any] | None, number: int
) -> None:
    """What a worker does first."""
    become_worker(number, workers, seed + number, source.dataset)
    if worker_init is not None:
        worker_init(number)


def _close(ahead: Ahead, pools: list[Pool]) -> None:
    ahead.close()
    for pool in pools:
        pool.close()


def _pinned(step: LoadedStep) -> LoadedStep:
    shares = [
        replace(share, batch=map_tensors(lambda tensor: tensor.pin_memory(), share.batch))
        for share in step.micro_batches
    ]
    return replace(step, micro_batches=tuple(shares))


def _below(stop_step: int | None, places: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for step, share in places:
        if stop_step is not None and step >= stop_step:
            return
        yield step, share


def _ordered_steps(
    order: SampleOrder, cut: Cut, epochs: int | None, wanted: Iterable[tuple[int, int]]
) -> Iterator[Outline]:
    for step, share in wanted:
        if epochs is not None and step >= order.first_step(epochs):
            return
        samples = order.at(step)
        ends = step + 1 == order.first_step(samples.epoch + 1)
        yield cut.outline(step, share, samples.epoch, ends, samples.ids)


def _stream_steps(
    source: Stream,
    reader: Reader,
    batch: int,
    epochs: int | None,
    wanted: Iterator[tuple[int, int]],
    draws: Draws,
) -> Iterator[Outline]:
    number, position = 0, next(wanted, None)
    entered = _entered(source, batch, draws.batch(position[0])) if position is not None else None
    for epoch in itertools.count() if epochs is None else range(epochs):
        begin = 0
        if entered is not None and position is not None:
            number = draws.batch(position[0])
            samples, begin = entered, number * batch
        else:
            samples = source.samples(epoch)
        entered = None
        current = tuple(itertools.islice(samples, batch))
        if not current:
            raise DataError(
                f"the stream has 0 samples in epoch {epoch}.",
                fix="give data that can be read again from its start, or the function that makes it.",
            )
        if source.drop_last and len(current) < batch:
            raise DataError(
                f"the stream has {len(current)} samples in epoch {epoch}, less than one batch of {batch}, and "
                "drop_last leaves them out.",
                fix="use a smaller batch, or drop_last=False.",
            )
        while current:
            following = tuple(itertools.islice(samples, batch))
            if source.drop_last and len(following) < batch:
                following = ()
            while position is not None and draws.batch(position[0]) == number:
                ids = torch.arange(begin, begin + len(current))
                step, share = position
                ends = not following and step + 1 == draws.first_step(number + 1)
                yield reader.cut.outline(step, share, epoch, ends, ids, current)
                position = next(wanted, None)
            if position is None:
                return
            number, begin, current = number + 1, begin + len(current), following


def _entered(source: Stream, batch: int, number: int) -> Iterator[Any] | None:
    """The first epoch from a batch on, where the stream can be entered there, and the epoch goes as far."""
    if number == 0 or source.seek is None:
        return None
    samples = source.samples(0, number * batch)
    first = list(itertools.islice(samples, 1))
    return itertools.chain(first, samples) if first else None
