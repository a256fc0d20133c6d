"""One step of a job under one plan, captured and compiled: what the plan leaves open is chosen with the first.

In: how ranks share the micro-batches of a step, and the shapes of their tensors. Out: a `Program`. It remembers what
holds for the whole run: where parameters are held, the resolved plan, and that a model cannot be captured.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod

import torch

from plait.errors import CaptureError, JobError, PlanError
from plait.graph.capture.capture import LeafShapes
from plait.graph.from_job import Captures
from plait.graph.graph import Graph, weighed_by_share, without_gradients
from plait.job.job import Job
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan
from plait.program.compile import compile_program
from plait.program.layout import Layout
from plait.program.program import Program
from plait.program.ranks import Settings
from plait.rewrite.choose import preset_like, rewrite_where_it_pays
from plait.run.prepare.opaque_steps import OpaqueSteps
from plait.run.prepare.trained import Trained
from plait.search.place.orders import better_as_written
from plait.search.place.resolve import resolve_again, resolve_placements
from plait.torch_private.fake import FAKE_LOGGER


@contextmanager
def _silent_torch() -> Iterator[None]:
    """While capturing: torch logs a traceback of its own for an operation that fails, which is reported anyway."""
    logger = logging.getLogger(FAKE_LOGGER)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _needs_inside(plan: Plan) -> str | None:
    """What of a plan works on the ops of the model; None: all of it runs a model that cannot be captured."""
    if plan.agreement.threads and plan.mesh.size > 1:
        return "replicas that run at once in one interpreter"
    return next((f"{name}={size}" for name, size in plan.mesh.axes if name != DATA and size > 1), None)


class StepCompiler:
    """Compiles steps, one shape after the other."""

    def __init__(
        self, job: Job, plan: Plan, captures: Captures, device: torch.device, *, several: bool
    ) -> None:
        """`several`: the job is one of several objectives."""
        self._job = job
        self._captures = captures
        captures.islands.all_sizes |= _needs_inside(plan) is not None
        self._device = device
        self._several = several
        self.opaque = OpaqueSteps(job, captures, device)
        """Of a model that cannot be captured."""
        self.plan = plan
        """As it was given; once a step is compiled, with what it left open."""
        self.choices: tuple[str, ...] = ()
        """How what the plan left open was chosen."""
        self.rewrites: tuple[str, ...] = ()
        """What became of graphs that were rewritten."""
        self.layout: Layout | None = None
        """Where parameters are held, once that is known."""
        self.partition: Mapping[str, object] = {}
        """Parameters that are not trained alike, which share no group."""
        self.untrained: frozenset[str] = frozenset()
        """Parameters that are frozen in these steps: no gradients of them are computed."""
        self.whole_tensors = False
        """Whether ZeRO cuts between parameters, because the optimizer needs whole ones."""
        self.capture_error: CaptureError | None = None
        """Why the model runs eagerly; None: it does not."""
        self.is_static = False
        """Whether the weight of a micro-batch is known from its shapes."""
        self.meets = False
        """Whether ranks exchange what they compute on samples; of a single one all read the same."""
        self._written = plan
        self._resolved_for: int | None = None
        self._captured = False
        self._trained = Trained()
        self._as_written: str | None = None
        """Why graphs are placed as they were written; empty: they are not; None: nothing was placed yet."""

    def follow(self, first: "StepCompiler") -> None:
        """Hold parameters as another compiler does, and choose ops anew."""
        self.layout, self.plan, self._resolved_for = first.layout, first.plan, -1

    def without(self, untrained: frozenset[str]) -> "StepCompiler":
        """Of the same steps while some parameters are frozen."""
        made = copy(self)
        made.untrained = untrained
        return made

    def leave_as_written(self) -> bool:
        """Rewrite no graph from here on; whether some were."""
        if not self.rewrites or self._written.rewrite == "off":
            return False
        self._written = replace(self._written, rewrite="off")
        self.rewrites = (
            "not rewritten: what pays depends on the shapes of a batch, and one program serves all.",
        )
        return True

    def give_up(self, error: CaptureError, shapes: Sequence[LeafShapes]) -> None:
        """Run eagerly from here on, where the plan allows it: of these shapes, the model cannot be captured."""
        if _needs_inside(self.plan) is None and self.plan.memory.offload == "none":
            self.capture_error = error
            return
        found = "; ".join(
            ", ".join(str(list(shape[1:])) for shape, _ in own) for own in dict.fromkeys(shapes)
        )
        raise JobError(
            f"a step has samples with tensors of {found}, unlike those before, and {error.what}",
            fix="give all samples the shapes that the model takes; pad them in `collate`.",
        ) from error

    def compile(
        self, units: Sequence[tuple[int, ...]], shapes: Sequence[LeafShapes], varies: bool
    ) -> Program:
        """A step of micro-batches that ranks share like `units`, of `shapes`; `varies`: other steps have others."""
        if self.capture_error is None:
            try:
                graphs, kinds = self._capture(units, shapes)
                if varies and not self._captured:
                    self._trained.see([*graphs.values(), *self._extremes(graphs)])
                graphs = self._trained.unified(graphs, alone=self.plan.ranks == 1 or not self._captured)
                if self.untrained:
                    graphs = {kind: without_gradients(g, self.untrained) for kind, g in graphs.items()}
            except CaptureError as error:
                if self._captured:
                    raise
                need = _needs_inside(self.plan)
                if self.plan.memory.offload != "none":
                    need = "memory.offload"
                if self._several and self.plan.memory.zero and self.plan.data_ranks > 1:
                    need = f"memory.zero={self.plan.memory.zero} with several objectives"
                if need is not None:
                    raise PlanError(
                        f"plan {self.plan.name} needs the inside of the model for {need}, but {error.what}",
                        fix=error.fix,
                    ) from error
                self.capture_error = error
            else:
                self._captured = True
                return self._of_graphs(units, graphs, kinds, varies)
        program = self.opaque.compile(self.plan, self._own_plan(), units, self.capture_error)
        if not self.plan.agreement.alone:
            self.layout = self.layout or program.layout
        return program

    def _capture(
        self, units: Sequence[tuple[int, ...]], shapes: Sequence[LeafShapes]
    ) -> tuple[dict[int, Graph], list[int]]:
        """Graphs of micro-batches, by kind, and the kind of each: its size, or another number for other shapes."""
        graphs: dict[int, Graph] = {}
        kinds: dict[tuple[int, LeafShapes], int] = {}
        with _silent_torch():
            for entry, own in zip(units, shapes, strict=True):
                size = sum(entry)
                if (size, own) not in kinds:
                    kind = size if size not in graphs else -len(graphs)
                    graphs[kind] = self._rewritten(self._captures.of_leaves(own, size))
                    kinds[(size, own)] = kind
        return graphs, [kinds[(sum(entry), own)] for entry, own in zip(units, shapes, strict=True)]

    def _extremes(self, graphs: Mapping[int, Graph]) -> Iterator[Graph]:
        """Of the smallest and the largest batch that was looked at: a forward may branch on the size."""
        seen = sorted(self._captures.seen, key=lambda shapes: sum(prod(shape[1:]) for shape, _ in shapes))
        size = next(iter(graphs.values())).num_samples
        for shapes in (seen[0], seen[-1]) if seen else ():
            with contextlib.suppress(CaptureError), _silent_torch():
                yield self._captures.of_leaves(shapes, size)

    def _rewritten(self, graph: Graph) -> Graph:
        """The graph, or a cheaper equal one, where the plan wants it; told once."""
        made = rewrite_where_it_pays(graph, self._written, self._device, self._num_steps)
        if made is None:
            return graph
        if made.changed:
            if self._as_written is None:
                self._as_written = better_as_written(
                    graph,
                    made.graph,
                    self._written,
                    preset_like(self._device),
                    self._job.build_optimizer,
                )
            if self._as_written:
                made = made.undone(graph, self._as_written)
        if made.line() not in self.rewrites:
            self.rewrites = (*self.rewrites, made.line())
        return made.graph

    @cached_property
    def _num_steps(self) -> int | None:
        return self._job.total_steps(self._captures.source.num_samples)

    def _of_graphs(
        self, units: Sequence[tuple[int, ...]], graphs: dict[int, Graph], kinds: list[int], varies: bool
    ) -> Program:
        settings = Settings(
            clip_norm=self._job.norm_bound,
            clip_value=self._job.clip_value,
            batch_norm=self._job.batch_norm,
            device=self._device,
            build_optimizer=self._job.build_optimizer,
            partition=self.partition,
            may_skip=self._job.precision == "fp16",
            whole_tensors=self.whole_tensors,
        )
        plans = self._resolve(graphs, kinds[0])
        self.is_static = self.is_static or any(graph.static_weight is not None for graph in graphs.values())
        if varies:
            graphs = {kind: weighed_by_share(graph) for kind, graph in graphs.items()}
        if self.plan.agreement.is_late:  # divided by the weights of all workers, on the server
            graphs = {
                kind: replace(graph, static_weight=None, weight_is_early=False)
                for kind, graph in graphs.items()
            }
        if self.plan.agreement.alone:
            return compile_program(graphs, self._own_plan(), kinds, settings)
        program = compile_program(graphs, self.plan, kinds, settings, units, self.layout, plans)
        self.layout = program.layout
        # where statistics are local, what is summed are the running ones, which weigh shares by their samples
        meeting = program.meets_within(sums=self._job.batch_norm == "global")
        self.meets = any(sum(units[at]) > 1 for at in meeting)
        if varies and meeting:
            program = replace(
                program, classes=tuple(replace(entry, same_sizes=meeting) for entry in program.classes)
            )
        return program

    def _own_plan(self) -> Plan:
        """The plan as a step sees it: a worker that meets nobody within a step is the only one."""
        return replace(self.plan, mesh=Mesh(axes=((DATA, 1),))) if self.plan.agreement.alone else self.plan

    def _resolve(self, graphs: Mapping[int, Graph], first: int) -> dict[int, Plan]:
        """Choose what the plan leaves open: parameters once for the run, ops for every size of a micro-batch."""
        if self._resolved_for is None:
            self.plan, self.choices = resolve_placements(
                graphs[first], self._written, self._job.build_optimizer
            )
            self._resolved_for = graphs[first].num_samples
        return {
            kind: self.plan
            if graph.num_samples == self._resolved_for
            else resolve_again(graph, self._written, self.plan, self._job.build_optimizer)
            for kind, graph in graphs.items()
        }
