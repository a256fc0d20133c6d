"""Static or dynamic: whether one graph serves every step of a job, and if not, why and what to do.

In: the captures of a job. Out: a `Verdict`.
"""

from dataclasses import dataclass
from typing import Literal

from plait.dynamic.counts import Scheduled
from plait.errors import CaptureError
from plait.graph.capture.capture import LeafShapes
from plait.graph.from_job import Captures
from plait.job.batch import Objects
from plait.torch_private import pytree

VerdictKind = Literal["static", "static for each shape", "static in parts", "dynamic"]
"""What the graph of a step depends on: nothing; shapes; values, in some modules; the sample or its values."""
_SHOWN = 4
"""Shapes that are written out."""
_BY_SAMPLE = (
    "wrap a function of one vertex in plait.Vertices, or code for one sample in plait.Batched: samples are then "
    "run together."
)
_TOGETHER = (
    "Nothing has to be done: samples are run together under single, ddp, zero, servers, averaging and hogwild; "
    "pipelines and tensor plans need one graph."
)
_EAGERLY = (
    "move what depends on values out of the step; or leave it: single, ddp, zero and servers run it eagerly."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What kind of graph a job's step is."""

    kind: VerdictKind
    why: str
    """A sentence."""
    where: str = ""
    """file:line, where one line is the cause."""
    fix: str = ""
    """What a person can do; empty: nothing has to be done."""

    def line(self) -> str:
        """For a console."""
        cause = f" ({self.where})" if self.where and self.where not in self.why else ""
        return f"{self.kind}: {self.why.rstrip('.')}{cause}.{f' {self.fix}' if self.fix else ''}"


def verdict_of(captures: Captures, num_samples: int) -> Verdict:
    """Capture a step of so many samples and say what its graph depends on."""
    try:
        graph = captures.of_size(num_samples)
    except CaptureError as error:
        return verdict_against(captures, error)
    ops = [str(node.target) for node in graph.ops()]
    islands = sum(op.startswith("plait.island") and "backward" not in op for op in ops)
    parts = (
        [f"{islands} {'call' if islands == 1 else 'calls'} of modules that need values"] if islands else []
    )
    parts += (
        ["the objective, where it needs values,"] if any(op.startswith("plait.ending") for op in ops) else []
    )
    if parts:
        verb = "runs" if not islands else "run"
        return Verdict(
            kind="static in parts", why=f"{' and '.join(parts)} {verb} eagerly between captured ops"
        )
    branches = sum(op.startswith("plait.chosen") for op in ops)
    every = f"one graph of {len(ops)} ops serves every step"
    if branches:
        every += "; all outcomes of its branches on values are in it"
    shapes = captures.seen
    if len(shapes) > 1:
        return Verdict(
            kind="static for each shape",
            why=f"samples differ in shape ({_written(shapes)}); {every} of a shape",
        )
    return Verdict(kind="static", why=every)


def verdict_against(captures: Captures, error: CaptureError) -> Verdict:
    """Of a job that cannot be captured."""
    parts = {n: p for n, p in captures.job.build_model().named_modules() if isinstance(p, Scheduled)}
    if parts:
        told = ", ".join(
            f"{name or 'the model'} is plait.{type(part).__name__}" for name, part in parts.items()
        )
        return Verdict(kind="dynamic", why=f"the graph differs from sample to sample: {told}", fix=_TOGETHER)
    by_sample = any(isinstance(leaf, Objects) for leaf in pytree.tree_leaves(captures.example))
    return Verdict(
        kind="dynamic", why=error.what, where=error.where or "", fix=_BY_SAMPLE if by_sample else _EAGERLY
    )


def _written(shapes: tuple[LeafShapes, ...]) -> str:
    texts = dict.fromkeys(
        "x".join(str(size) for size in leaves[0][0][1:]) or "numbers" for leaves in shapes if leaves
    )
    shown = list(texts)[:_SHOWN]
    return ", ".join(shown) + (", ..." if len(texts) > _SHOWN else "")
