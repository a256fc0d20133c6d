"""From a job to its graphs: read the batch's layout once, then capture each micro-batch shape on demand.

In: a job and its opened data. Out: graphs, one per shape, kept for reuse.
"""

from typing import Any

import torch

from plait.errors import CaptureError
from plait.graph.batch import read_layout, resize_shapes
from plait.graph.capture.capture import LeafShapes, capture
from plait.graph.graph import Graph
from plait.job.data.open import Source, open_data
from plait.job.dtypes import leaf_dtype
from plait.job.job import Job
from plait.torch_private import pytree


class Captures:
    """The graphs of one job, by the shapes of the micro-batch."""

    def __init__(self, job: Job, source: Source | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.job = job
        self.source = source if source is not None else open_data(job.data, job.collate)
        self.dtype = dtype
        first = torch.zeros(3, dtype=torch.int64)
        two, three = self.source.fetch(first[:2]), self.source.fetch(first)
        self.layout = read_layout(two, 2, three, 3)
        self.example = two
        self.narrow: bool | None = None
        """Whether float64 data is given to the model as float32, as it takes no other; None: not known yet."""
        self._graphs: dict[tuple[int, LeafShapes], Graph] = {}

    @property
    def first(self) -> Graph | None:
        """Any graph that was captured so far."""
        return next(iter(self._graphs.values()), None)

    def of_size(self, num_samples: int) -> Graph:
        """The graph of a micro-batch of `num_samples` samples shaped like the first one of the data."""
        return self.of_shapes(num_samples, self.shapes(self.example, num_samples))

    def of_batch(self, batch: Any, num_samples: int) -> Graph:
        """The graph of a micro-batch of `num_samples` samples of which `batch` is a share."""
        return self.of_shapes(num_samples, self.shapes(batch, num_samples))

    def shapes(self, batch: Any, num_samples: int) -> LeafShapes:
        """What identifies the graph of a micro-batch."""
        found = resize_shapes(self.layout, self.layout.tensors(batch), num_samples)
        return _narrowed(found) if self.narrow else found

    def of_shapes(self, num_samples: int, shapes: LeafShapes) -> Graph:
        """The graph of a micro-batch with leaves of these shapes."""
        key = (num_samples, shapes)
        if key not in self._graphs:
            self._graphs[key] = self._captured(num_samples, shapes)
        return self._graphs[key]

    def _captured(self, num_samples: int, shapes: LeafShapes) -> Graph:
        constants = pytree.tree_leaves(self.example)
        try:
            graph = capture(self.job, self.layout, constants, shapes, num_samples, self.dtype)
        except CaptureError:
            if self.narrow is not None or _narrowed(shapes) == shapes or self.dtype == torch.float64:
                raise
            try:
                graph = capture(self.job, self.layout, constants, _narrowed(shapes), num_samples, self.dtype)
            except CaptureError:
                pass
            else:
                self.narrow = True
                return graph
            raise
        if self.dtype != torch.float64:
            self.narrow = bool(self.narrow)
        return graph


def _narrowed(shapes: LeafShapes) -> LeafShapes:
    return tuple((shape, leaf_dtype(dtype, torch.float32, narrow=True)) for shape, dtype in shapes)
