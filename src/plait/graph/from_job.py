"""From a job to its graphs: read the batch's layout once, then capture each micro-batch shape on demand.

In: a job and its opened data. Out: graphs, one per shape, kept for reuse.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch

from plait.errors import CaptureError
from plait.graph.batch import confirmed, read_layout, resize_shapes, resized
from plait.graph.capture.capture import LeafShapes, capture
from plait.graph.capture.islands import Islands
from plait.graph.capture.questions import Questions
from plait.graph.capture.widen import widened
from plait.graph.graph import Graph
from plait.job.data.open import Source, open_data
from plait.job.job import Job
from plait.job.model.dtypes import leaf_dtype
from plait.latest import Latest
from plait.torch_private import pytree

_KEPT = 12
"""Graphs that are kept."""
_SAMPLES = 16
"""Samples whose shapes are looked at before the run."""
_LARGEST_BATCH = 64
"""Samples of a batch that is looked at."""


class Captures:
    """The graphs of one job, by the shapes of the micro-batch."""

    def __init__(
        self,
        job: Job,
        source: Source | None = None,
        dtype: torch.dtype = torch.float32,
        device_type: str = "cpu",
    ) -> None:
        self.job = job
        self.device_type = device_type if job.precision != "fp32" else "cpu"
        """What the steps will run on, where their precision depends on it."""
        self.source = (
            source
            if source is not None
            else open_data(job.data, job.collate, skip_bad=job.skip_bad, drop_last=job.drop_last)
        )
        self.dtype = dtype
        first = torch.zeros(3, dtype=torch.int64)
        two, three = self.source.fetch(first[:2]), self.source.fetch(first)
        self.layout = read_layout(two, 2, three, 3)
        self.example = two
        self._looked_at = list(self._look()) if job.collate is not None else []
        """Of samples from all over the data, each alone, and of two batches: how many, and the tensors' shapes."""
        self.layout = confirmed(self.layout, two, self._looked_at)
        self.narrow: bool | None = None
        """Whether float64 data is given to the model as float32, as it takes no other; None: not known yet."""
        self.islands = Islands(job)
        """Modules that run eagerly between captured ones."""
        self.questions = Questions()
        """What the model is told where it asks whether it is traced."""
        self._graphs = Latest[tuple[int, LeafShapes], Graph](_KEPT)
        self._seen: tuple[LeafShapes, ...] | None = None

    @property
    def seen(self) -> tuple[LeafShapes, ...]:
        """Shapes of a few samples and batches, counting none on dims that count samples; the same on every rank."""
        if self._seen is None:
            looked_at = [resized(self.layout, shapes, 0) for _, shapes in self._looked_at]
            self._seen = tuple(dict.fromkeys([self.extents(self.example), *looked_at]))
        return self._seen

    def _look(self) -> Iterator[tuple[int, LeafShapes]]:
        """What cannot be read is told when it is used."""
        count = self.source.num_samples
        chosen = torch.arange(_SAMPLES) if count is None else torch.linspace(0, count - 1, _SAMPLES).long()
        size = min(-(-self.job.batch // self.job.accumulate), _LARGEST_BATCH, count or _SAMPLES)
        groups = [torch.tensor([index]) for index in dict.fromkeys(chosen.tolist())]
        if count is not None:
            order = self.job.order(count)
            assert order is not None
            groups += [order.at(step).ids[:size] for step in range(min(2, order.num_batches_per_epoch))]
        for ids in groups:
            try:
                batch = self.source.fetch(ids)
                leaves, spec = pytree.tree_flatten(batch)
                same = spec == self.layout.spec and [
                    isinstance(leaf, torch.Tensor) for leaf in leaves
                ] == list(self.layout.is_tensor)
            except Exception:
                continue
            if same:
                yield len(ids), tuple((tuple(t.shape), t.dtype) for t in self.layout.tensors(batch))

    @property
    def first(self) -> Graph | None:
        """Any graph that was captured so far."""
        return next((self._graphs.get(key) for key in self._graphs), None)

    def of_size(self, num_samples: int) -> Graph:
        """The graph of a micro-batch of `num_samples` samples shaped like the first one of the data."""
        return self.of_batch(self.example, num_samples)

    def of_batch(self, batch: Any, num_samples: int) -> Graph:
        """The graph of a micro-batch of `num_samples` samples of which `batch` is a share."""
        return self.of_shapes(num_samples, self.shapes(batch, num_samples))

    def latest(self, num_samples: int) -> Graph:
        """Some graph of micro-batches of `num_samples` samples: one that is known, if there is any."""
        for key in self._graphs:
            if key[0] == num_samples and (graph := self._graphs.get(key)) is not None:
                return graph
        return self.of_size(num_samples)

    def of_leaves(self, shapes: LeafShapes, num_samples: int) -> Graph:
        """The graph of a micro-batch of `num_samples` samples with leaves like these (`extents`)."""
        leaves = resized(self.layout, shapes, num_samples)
        return self.of_shapes(num_samples, _narrowed(leaves) if self.narrow else leaves)

    def extents(self, batch: Any) -> LeafShapes:
        """The shapes of a batch's tensors as they come, whatever number of samples they count."""
        return resize_shapes(self.layout, self.layout.tensors(batch), 0)

    def shapes(self, batch: Any, num_samples: int) -> LeafShapes:
        """What identifies the graph of a micro-batch."""
        found = resize_shapes(self.layout, self.layout.tensors(batch), num_samples)
        return _narrowed(found) if self.narrow else found

    def of_shapes(self, num_samples: int, shapes: LeafShapes) -> Graph:
        """The graph of a micro-batch with leaves of these shapes."""
        key = (num_samples, shapes)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._captured(num_samples, shapes)
            self._graphs.put(key, graph)
        return graph

    def reopened(self) -> "Captures":
        """The same graphs, of data that is opened anew: nobody has read from it."""
        found = copy(self)
        found.source = open_data(
            self.job.data, self.job.collate, skip_bad=self.job.skip_bad, drop_last=self.job.drop_last
        )
        return found

    def forget(self) -> None:
        """Capture anew what is asked for next."""
        self._graphs = Latest(_KEPT)

    def _captured(self, num_samples: int, shapes: LeafShapes) -> Graph:
        constants = pytree.tree_leaves(self.example)
        try:
            graph = self._capture(constants, shapes, num_samples)
        except CaptureError:
            if self.narrow is not None or _narrowed(shapes) == shapes:
                raise
            try:
                graph = self._capture(constants, _narrowed(shapes), num_samples)
            except CaptureError:
                pass
            else:
                self.narrow = True
                return graph
            raise
        self.narrow = bool(self.narrow)
        return graph

    def _capture(self, constants: Sequence[Any], shapes: LeafShapes, num_samples: int) -> Graph:
        others = [key for key in self._graphs if key != (num_samples, shapes)]
        graph = capture(
            self.job,
            self.layout,
            constants,
            shapes,
            num_samples,
            self.device_type,
            self.islands,
            others,
            self.questions,
        )
        return widened(graph) if self.dtype == torch.float64 else graph


def _narrowed(shapes: LeafShapes) -> LeafShapes:
    return tuple((shape, leaf_dtype(dtype, torch.float32, narrow=True)) for shape, dtype in shapes)
