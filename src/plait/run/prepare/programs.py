"""The programs of a run: one per shape of a step, captured and compiled when the shape first occurs.

In: a job, a plan, the shapes of a step. Out: a `Program`. A model that cannot be captured gets programs with opaque
instructions, and the reason is kept for the user.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from plait.errors import CaptureError, JobError, PlanError
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.data.loader import Share
from plait.job.data.open import Source
from plait.job.job import Job
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan
from plait.program.compile import Settings, compile_program, complete
from plait.program.layout import Layout
from plait.program.opaque import ParameterShape, compile_opaque
from plait.program.program import Program
from plait.program.value import Value
from plait.program.write.averaging import Flat, flats_of
from plait.run.interpret.eager import counts_samples
from plait.run.interpret.holding import Holding
from plait.run.interpret.parts import server_layout
from plait.run.link.links import Links, NoLinks
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
    if plan.memory.zero > 0 and plan.data_ranks > 1:
        return f"memory.zero={plan.memory.zero}"
    return next((f"{name}={size}" for name, size in plan.mesh.axes if name != DATA and size > 1), None)


def _told(shapes: Any) -> str:
    """The shapes of a batch's tensors, for people."""
    return ", ".join(str(list(shape)) for shape, *_ in shapes)


class Programs:
    """Programs of one job under one plan, by the shape of the step."""

    def __init__(
        self,
        job: Job,
        source: Source,
        plan: Plan,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        captures: Captures | None = None,
    ) -> None:
        self.job = job
        self.plan = plan
        self.device = device
        self.captures = captures if captures is not None else Captures(job, source, dtype)
        self.capture_error: CaptureError | None = None
        self.held_out: Source | None = None
        """The job's evaluation data, opened."""
        self.choices: tuple[str, ...] = ()
        """How what the plan left open was chosen."""
        self._layout: Layout | None = None
        self._written = plan
        """The plan as it was given."""
        self._resolved_for: int | None = None
        self._programs: dict[Any, Program] = {}
        self._parameters: tuple[ParameterShape, ...] | None = None
        self._plain: dict[Any, Program] = {}
        """What workers compute in a step, without averages and servers, by shape."""
        self._averaged: tuple[Flat, ...] | None = None

    def for_step(self, shares: Sequence[Share], fragments: tuple[int, ...] = ()) -> Program:
        """The program of a step, of whose micro-batches this rank has `shares`.

        Of workers that do not meet within a step: what one of them does with what `own_shares` leaves. `fragments` of
        the model are averaged in it (`plan.agreement.due`).
        """
        shapes = tuple((share.sizes, self.captures.shapes(share.batch, sum(share.sizes))) for share in shares)
        key = (shapes, fragments)
        if key not in self._programs:
            if shapes not in self._plain:
                self._plain[shapes] = self._compile(shares) if shares else self._empty()
            self._programs[key] = complete(self._plain[shapes], self.plan, self._flats(), fragments)
        return self._programs[key]

    def round(self) -> list[Program]:
        """The programs of whole steps from one time that weights are mixed to the next; mostly just one."""
        agreement, sizes = self.plan.agreement, self.full_shares()
        count = sum(map(sum, sizes))
        samples = self.captures.source.num_samples or count
        length = agreement.round if agreement.round is not None else -(-samples // count)
        if agreement.mix is None:
            length = 1
        first = agreement.warmup
        return [
            self.for_sizes(sizes, agreement.due(first + step, step == length - 1)) for step in range(length)
        ]

    def _empty(self) -> Program:
        """What a worker does in a step of which it has no samples: nothing, unless weights are averaged in it."""
        (entry,) = self._first().classes
        nothing = replace(entry, instructions=(), buckets=(), segments={}, constants={})
        return replace(self._first(), micro_batches=(), shares=(), classes=(nothing,))

    def _flats(self) -> tuple[Flat, ...]:
        """What is averaged, in the order in which the backward fills it."""
        if self.plan.agreement.mix is None:
            return ()
        if self._averaged is None:
            trained = {
                name: (shape, bucket.dtype)
                for bucket in self._first().buckets
                for name, shape in zip(bucket.parameters, bucket.shapes, strict=True)
            }
            self._averaged = flats_of(self.plan, trained, self._changing_buffers())
        return self._averaged

    def _changing_buffers(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Buffers that a step changes; of a model that runs eagerly, all."""
        if self.capture_error is not None:
            buffers = {name: b.to(self._own_dtype(b)) for name, b in self.job.build_model().named_buffers()}
        else:
            graph = self.captures.of_size(self._first().micro_batches[0])
            nodes = graph.nodes()
            given = {entry.name: nodes[entry.node].meta["val"] for entry in graph.inputs_of("buffer")}
            buffers = {name: given[name] for name in graph.new_buffers}
        return {name: (tuple(b.shape), b.dtype) for name, b in buffers.items() if b.is_floating_point()}

    def _first(self) -> Program:
        """Some step without averages: parameters and buffers are the same in all."""
        assert self._plain, "prepare compiles a step before any is run"
        return next(iter(self._plain.values()))

    def for_sizes(self, sizes: Sequence[tuple[int, ...]], fragments: tuple[int, ...] = ()) -> Program:
        """The program of a step whose micro-batches are shared like this, shaped like the first sample."""
        steps = list(sizes)
        if not self.plan.agreement.alone:
            return self._for_sizes(steps, fragments)
        by_worker = [[(units[at],) for units in steps if units[at]] for at in range(self.plan.data_ranks)]
        return next(iter([self._for_sizes(own, fragments) for own in by_worker if own]))

    def full_step(self) -> Program:
        """Compile the step that has all samples of a batch, if that was not done yet; its buckets are those of all."""
        return self.for_sizes(self.full_shares())

    def full_shares(self) -> list[tuple[int, ...]]:
        """How ranks share its micro-batches."""
        return self.job.step_shares(self.captures.source.num_samples, self.plan.data_ranks)

    def _for_sizes(self, sizes: Sequence[tuple[int, ...]], fragments: tuple[int, ...]) -> Program:
        example = self.captures.example
        return self.for_step(
            [Share(batch=example, ids=(), sizes=units, offset=0, global_offset=0) for units in sizes],
            fragments,
        )

    def own_shares(self, shares: Sequence[Share]) -> list[Share]:
        """What a rank computes on: of workers that do not meet within a step, their samples are all there are."""
        if not self.plan.agreement.alone:
            return list(shares)
        return [replace(share, sizes=(len(share.ids),)) for share in shares if share.ids]

    def _compile(self, shares: Sequence[Share]) -> Program:
        sizes = [sum(share.sizes) for share in shares]
        units = [share.sizes for share in shares]
        if self.capture_error is None:
            self._check_shapes(shares)
            graphs: dict[int, Graph] = {}
            try:
                with _silent_torch():
                    for size, share in zip(sizes, shares, strict=True):
                        graphs[size] = self.captures.of_batch(share.batch, size)
            except CaptureError as error:
                if (need := _needs_inside(self.plan)) is not None:
                    if self._programs:
                        number = next(i for i, size in enumerate(sizes) if size not in graphs)
                        found = _told(self.captures.shapes(shares[number].batch, sizes[number]))
                        raise JobError(
                            f"micro-batch {number} of a step has tensors of {found}, unlike those before, and "
                            f"{error.what}",
                            fix="give all samples the shapes that the model takes; pad them in `collate`.",
                        ) from error
                    raise PlanError(
                        f"plan {self.plan.name} needs the inside of the model for {need}, but {error.what}",
                        fix=error.fix,
                    ) from error
                self.capture_error = error
            else:
                settings = Settings(
                    clip_norm=self.job.clip_norm,
                    batch_norm=self.job.batch_norm,
                    device=self.device,
                    build_optimizer=self.job.build_optimizer,
                )
                plans = self._resolve(graphs, sizes[0])
                if self.plan.agreement.is_late:  # divided by the weights of all workers, on the server
                    graphs = {
                        size: replace(graph, static_weight=None, weight_is_early=False)
                        for size, graph in graphs.items()
                    }
                if self.plan.agreement.alone:
                    return compile_program(graphs, self._own_plan(), sizes, settings)
                program = compile_program(graphs, self.plan, sizes, settings, units, self._layout, plans)
                self._layout = program.layout
                return program
        return compile_opaque(
            self._own_plan(),
            self._shapes(),
            sizes,
            units,
            clip_norm=self.job.clip_norm,
            notices=self._opaque_notices(),
            buffers=[name for name, _ in self.job.build_model().named_buffers()],
        )

    def _own_plan(self) -> Plan:
        """The plan as a step sees it: a worker that meets nobody within a step is the only one."""
        return replace(self.plan, mesh=Mesh(axes=((DATA, 1),))) if self.plan.agreement.alone else self.plan

    def _check_shapes(self, shares: Sequence[Share]) -> None:
        """Refuse micro-batches of one step that have as many samples of other shapes: they share a program's graph."""
        first: dict[int, tuple[int, Any]] = {}
        for number, share in enumerate(shares):
            size = sum(share.sizes)
            found = self.captures.shapes(share.batch, size)
            earlier, wanted = first.setdefault(size, (number, found))
            if found != wanted:
                raise JobError(
                    f"micro-batch {number} of a step has tensors of {_told(found)}, micro-batch {earlier} of "
                    f"{_told(wanted)}.",
                    fix="pad the samples of a step to one shape in `collate`, or set accumulate=1.",
                )

    def _resolve(self, graphs: Mapping[int, Graph], first: int) -> dict[int, Plan]:
        """Choose what the plan leaves open: parameters once for the run, ops for every size of a micro-batch."""
        if self._resolved_for is None:
            self.plan, self.choices = resolve_placements(
                graphs[first], self._written, self.job.build_optimizer
            )
            self._resolved_for = first
        return {
            size: self.plan
            if size == self._resolved_for
            else resolve_again(graph, self._written, self.plan, self.job.build_optimizer)
            for size, graph in graphs.items()
        }

    @property
    def layout(self) -> Layout | None:
        """Where parameters are held, known once a step has been compiled; None: whole on every rank."""
        assert self._programs, "compile a step first: full_step()"
        return None if self._layout is None or self._layout.is_whole else self._layout

    def holding(self, rank: int, links: Links, device: torch.device) -> Holding | None:
        """What a rank holds of the parameters; None: all."""
        servers = self.plan.sync.servers
        if rank >= self.plan.mesh.size and servers > 1:
            named = dict(self.job.build_model().to(self.captures.dtype).named_parameters())
            cut = server_layout(self.full_step().buckets, named, servers)
            return Holding(cut, rank - self.plan.mesh.size, NoLinks(), device)
        layout = self.layout if rank < self.plan.mesh.size else None
        return Holding(layout, rank, links, device) if layout is not None else None

    def _shapes(self) -> tuple[ParameterShape, ...]:
        if self._parameters is None:
            model = self.job.build_model()
            entries: list[tuple[Value, torch.Tensor]] = [
                (Value.parameter(n), p) for n, p in model.named_parameters() if p.requires_grad
            ]
            if self.plan.mesh.size > 1 and not self.plan.agreement.alone:
                entries += [(Value.buffer(n), b) for n, b in model.named_buffers()]
            self._parameters = tuple(
                ParameterShape(
                    value=value,
                    shape=tuple(t.shape),
                    dtype=self._own_dtype(t) if t.is_floating_point() else torch.float64,
                )
                for value, t in entries
            )
        return self._parameters

    def _own_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """What a tensor of the model is in this run."""
        dtype = self.captures.dtype
        return dtype if dtype == torch.float64 and tensor.is_floating_point() else tensor.dtype

    def _opaque_notices(self) -> tuple[str, ...]:
        assert self.capture_error is not None
        notices = [f"running eagerly: {self.capture_error.what}"]
        if counts_samples(self.job):
            notices.append(
                "the loss counts as a mean over its samples; return (total, weight) from `objective` to say otherwise."
            )
        if self.plan.mesh.size > 1:
            notices.append(
                "run eagerly, each rank's forward sees its own share alone: batch norm, and branches, state and hooks "
                "that depend on the batch, are not those of one process, and dropout masks depend on the ranks."
            )
        return tuple(notices)
