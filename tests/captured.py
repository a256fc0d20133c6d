"""Graphs of jobs that tests capture again and again, captured and checked once in a process.

In: what `capture` is given. Out: what it gives, a copy for everybody who asks. What a test patches may change what is
captured, so such tests share nothing (`conftest.py`); nor do models with islands, or
that ask whether they are traced: a capture notes these elsewhere.
"""

import io
import sys
import tempfile
from dataclasses import fields, replace
from hashlib import sha256
from typing import Any

import cloudpickle
import torch
from torch import Tensor, fx

from plait.graph import from_job
from plait.graph.capture.capture import capture
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.latest import Latest
from plait.run import train
from plait.run.prepare.programs import Programs
from plait.run.proof.first_step import check_capture

_KEPT = 200
"""Graphs that are kept."""
_NOT_OF_THE_STEP = (
    "data", "evaluate", "metrics", "optimizer", "schedule", "follow", "until", "collate", "sampler", "lengths", "batch",
    "accumulate", "epochs", "steps", "evaluate_every", "shuffle", "drop_last", "workers", "prefetch", "skip_bad",
    "clip_norm", "clip_value", "average", "freeze",
)  # fmt: skip
"""Fields of a job on which the graph of a micro-batch does not depend."""


class Shared:
    """Stands in for `capture`."""

    def __init__(self) -> None:
        self.known = Latest[bytes, Graph](_KEPT)
        self.is_used = False

    def __call__(self, job: Job, *given: Any) -> Graph:
        layout, constants, *shape, islands, sizes, questions = given
        others = [None if isinstance(value, Tensor) else value for value in constants]
        is_plain = not islands.notices() and not questions.asked
        key = (
            self.key(job, layout, others, *shape, islands.all_sizes, sizes)
            if self.is_used and is_plain
            else None
        )
        known = self.known.get(key) if key is not None else None
        if known is not None:
            return _copy(known)
        made = capture(job, *given)
        if key is not None and not islands.notices() and not questions.asked:
            self.known.put(key, _copy(made))
        return made

    def key(self, job: Job, *others: Any) -> bytes | None:
        """What a graph of this job depends on; None where that cannot be said."""
        if not all(_lasts(given) for given in (job.model, job.loss, job.objective)):
            return None
        step = [getattr(job, field.name) for field in fields(job) if field.name not in _NOT_OF_THE_STEP]
        file = io.BytesIO()
        try:
            _Pickler(file).dump((step, others))
        except Exception:  # a model that holds what cannot be pickled
            return None
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """A tensor is its numbers: torch's own pickles differ from time to time."""
        if isinstance(value, Tensor):
            numbers = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            return str, (f"{value.dtype} {sha256(numbers).hexdigest()} {tuple(value.shape)}",)
        return super().reducer_override(value)


def _lasts(given: Any) -> bool:
    """Whether what goes by this name is always the same: not where a test wrote the file."""
    named = given if hasattr(given, "__qualname__") else type(given)
    file = getattr(sys.modules.get(named.__module__), "__file__", None)
    return file is None or not file.startswith(tempfile.gettempdir())


def _copy(graph: Graph) -> Graph:
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        assert copies[node].name == node.name
    return replace(graph, graph=made, known={})


SHARED = Shared()
vars(from_job)["capture"] = SHARED


class Checked:
    """Stands in for `check_capture`: a job that was once held against the user's own code is not again."""

    def __init__(self) -> None:
        self.known: dict[bytes, str | None] = {}

    def __call__(self, job: Job, programs: Programs) -> str | None:
        plan, example = programs.plan, programs.captures.example
        key = SHARED.key(job, job.batch, job.accumulate, plan.ranks > 1, plan.rewrite, example)
        if not SHARED.is_used or key is None:
            return check_capture(job, programs)
        if key not in self.known:
            self.known[key] = check_capture(job, programs)
        return self.known[key]


vars(train)["check_capture"] = Checked()
