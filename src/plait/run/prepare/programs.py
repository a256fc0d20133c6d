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
from plait.graph.capture.capture import LeafShapes
from plait.graph.from_job import Captures
from plait.graph.graph import Graph, weighed_by_share
from plait.job.data.loader import Rows
from plait.job.data.open import Source
from plait.job.data.share import Share
from plait.job.job import Job
from plait.job.updates.clip import Clip
from plait.latest import Latest
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan
from plait.program.compile import Settings, compile_program, complete
from plait.program.layout import Layout
from plait.program.opaque import ParameterShape, compile_opaque
from plait.program.program import Program
from plait.program.value import Value
from plait.program.write.averaging import Flat, flats_of
from plait.run.eager.trial import Trial, try_eagerly
from plait.run.hold.holding import Holding
from plait.run.hold.parts import server_layout
from plait.run.link.links import Links, NoLinks
from plait.run.prepare.varying import Varying
from plait.search.place.resolve import resolve_again, resolve_placements
from plait.torch_private import pytree
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
    return next((f"{name}={size}" for name, size in plan.mesh.axes if name != DATA and size > 1), None)


_CUTS = 32
"""Ways to cut a step whose programs are kept."""
_TOLD_AT = 3
"""Shapes that are compiled one by one before the user is told."""


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
        """`job` has one objective; of a job with several, each has programs of its own (`several`)."""
        self.job = self.whole = job
        self.parts: tuple[Programs, ...] = (self,)
        """Those of each objective; `whole` is the job of all of them."""
        self.partition: Mapping[str, object] = {}
        """Parameters that are not trained alike, which share no group."""
        self.whole_tensors = False
        """Whether ZeRO cuts between parameters, because the optimizer needs whole ones."""
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
        self._varying = Latest[Any, Varying](_CUTS)
        """By how a step is cut."""
        self._told_shapes = False
        self._captured = self._static = self._meets = False
        self._news: list[str] = []
        self._parameters: tuple[ParameterShape, ...] | None = None
        self._trial: Trial | None = None
        self._plain: Program | None = None
        """What workers compute in some step, without averages and servers."""
        self._averaged: tuple[Flat, ...] | None = None

    @classmethod
    def several(
        cls, job: Job, source: Source, plan: Plan, device: torch.device, dtype: torch.dtype
    ) -> "Programs":
        """Those of the first objective, which lead to all others; parameters are held alike by all."""
        made = tuple(cls(part, source, plan, device, dtype) for part in job.parts())
        for one in made:
            one.parts, one.whole = made, job
        return made[0]

    def hold_whole_tensors(self) -> None:
        """Compile anew, with ZeRO's cuts between parameters."""
        self.whole_tensors, self._layout, self._plain = True, None, None
        self._varying = Latest[Any, Varying](_CUTS)

    def at(self, step: int) -> "Programs":
        """Those of the objective whose turn a step is."""
        return self.parts[self.whole.turn(step).objective]

    def follow(self, first: "Programs") -> None:
        """Hold parameters as the programs of the first objective do, and choose ops anew."""
        self._layout, self.plan, self._resolved_for = first._layout, first.plan, -1

    def for_step(self, shares: Sequence[Share], fragments: tuple[int, ...] = ()) -> Program:
        """The program of a step, of whose micro-batches this rank has `shares`: one for all shapes where that can be.

        Of workers that do not meet within a step: what one of them does with what `own_shares` leaves. `fragments` of
        the model are averaged in it (`plan.agreement.due`).
        """
        units = tuple(share.sizes for share in shares)
        key = (units, fragments)
        varying = self._varying.get(key)
        if varying is None:

            def build(shapes: Sequence[LeafShapes], *, varies: bool) -> Program:
                step = self._compile(units, shapes, varies) if units else self._empty()
                self._plain = self._plain or step
                return complete(step, self.plan, self._flats(), fragments)

            seen = self.captures.seen if shares else ()
            varying = Varying(build, len(units), seen, self._allow_variation)
            self._varying.put(key, varying)
        if self.capture_error is not None:  # what runs eagerly takes any shape
            return varying.any() or varying.of(())
        shapes = tuple(self.captures.extents(share.batch) for share in shares)
        try:
            program = varying.of(shapes)
        except CaptureError as error:
            self._give_up(error, shapes)
            return self.for_step(shares, fragments)
        if varying.num_single >= _TOLD_AT and not self._told_shapes:
            self._told_shapes = True
            self._news.append(
                f"{varying.num_single} shapes of a batch so far, each captured and compiled anew, because "
                f"{varying.reason}. Fix: let `collate` pad to a few sizes, such as multiples of 64."
            )
        return program

    def _give_up(self, error: CaptureError, shapes: Sequence[LeafShapes]) -> None:
        """Run eagerly from here on, where the plan allows it: of these shapes, the model cannot be captured."""
        if _needs_inside(self.plan) is None:
            self.capture_error = error
            return
        found = "; ".join(
            ", ".join(str(list(shape[1:])) for shape, _ in own) for own in dict.fromkeys(shapes)
        )
        raise JobError(
            f"a step has samples with tensors of {found}, unlike those before, and {error.what}",
            fix="give all samples the shapes that the model takes; pad them in `collate`.",
        ) from error

    @property
    def rows(self) -> Rows | None:
        """How shares are taken out of whole micro-batches, where ranks must be padded alike; None: they need not."""
        alike = (entry.same_sizes for part in self.parts for entry in part.full_step().classes)
        return self._rows if any(alike) else None

    def _rows(self, batch: Any, start: int, count: int) -> Any:
        leaves, spec = pytree.tree_flatten(batch)
        counts = iter(self.captures.layout.has_samples)
        cut = [
            leaf[start : start + count] if isinstance(leaf, torch.Tensor) and next(counts) else leaf
            for leaf in leaves
        ]
        return pytree.tree_unflatten(cut, spec)

    def news(self) -> list[str]:
        """What the user should know since this was asked last."""
        found, self._news = self._news, []
        return found

    def _allow_variation(self) -> None:
        """Called when a shape is unlike all that were seen before the run."""
        together = self.plan.data_ranks > 1 and not self.plan.agreement.alone
        if together and self.capture_error is None and self._meets:
            raise JobError(
                "batches have several shapes, unlike those that were looked at first, and ranks exchange what they "
                "compute on them, for batch statistics or whole tensors.",
                fix="let `collate` pad all samples to one shape.",
            )
        if together and self.capture_error is None and self._static:
            raise JobError(
                "batches have several shapes, unlike those that were looked at first, and the loss is a mean over all "
                "of their elements: the shares of a step cannot be weighed.",
                fix="return (total, weight) from `objective`, so that each share says what it weighs.",
            )

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
            graph = self.captures.latest(self._first().micro_batches[0])
            nodes = graph.nodes()
            given = {entry.name: nodes[entry.node].meta["val"] for entry in graph.inputs_of("buffer")}
            buffers = {name: given[name] for name in graph.new_buffers}
        return {name: (tuple(b.shape), b.dtype) for name, b in buffers.items() if b.is_floating_point()}

    def _first(self) -> Program:
        """Some step without averages: parameters and buffers are the same in all."""
        assert self._plain is not None, "prepare compiles a step before any is run"
        return self._plain

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

    def _compile(
        self, units: Sequence[tuple[int, ...]], shapes: Sequence[LeafShapes], varies: bool
    ) -> Program:
        if self.capture_error is None:
            try:
                graphs, kinds = self._capture(units, shapes)
            except CaptureError as error:
                if self._captured:
                    raise
                need = _needs_inside(self.plan)
                if len(self.parts) > 1 and self.plan.memory.zero and self.plan.data_ranks > 1:
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
        sizes = [sum(entry) for entry in units]
        trial = self._try()
        program = compile_opaque(
            self._own_plan(),
            self._shapes(),
            sizes,
            units,
            clip=Clip.of(self.job.clip_norm, self.job.clip_value),
            notices=self._opaque_notices(trial),
            buffers=[name for name, _ in self.job.build_model().named_buffers()],
            draw_dims=trial.draw_dims,
            watched=trial.watched,
            device=self.device,
        )
        if not self.plan.agreement.alone:
            self._layout = self._layout or program.layout
        return program

    def _try(self) -> Trial:
        """What one forward of the user's code tells of all."""
        if self._trial is None:
            captures = self.captures
            three = captures.source.fetch(torch.zeros(3, dtype=torch.int64))
            self._trial = try_eagerly(self.job, captures.example, 2, three, 3)
            captures.narrow = self._trial.narrow
        return self._trial

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
                    graphs[kind] = self.captures.of_leaves(own, size)
                    kinds[(size, own)] = kind
        return graphs, [kinds[(sum(entry), own)] for entry, own in zip(units, shapes, strict=True)]

    def _of_graphs(
        self, units: Sequence[tuple[int, ...]], graphs: dict[int, Graph], kinds: list[int], varies: bool
    ) -> Program:
        settings = Settings(
            clip_norm=self.job.clip_norm,
            clip_value=self.job.clip_value,
            batch_norm=self.job.batch_norm,
            device=self.device,
            build_optimizer=self.job.build_optimizer,
            partition=self.partition,
            whole_tensors=self.whole_tensors,
        )
        plans = self._resolve(graphs, kinds[0])
        self._static = self._static or any(graph.static_weight is not None for graph in graphs.values())
        if varies:
            graphs = {kind: weighed_by_share(graph) for kind, graph in graphs.items()}
        if self.plan.agreement.is_late:  # divided by the weights of all workers, on the server
            graphs = {
                kind: replace(graph, static_weight=None, weight_is_early=False)
                for kind, graph in graphs.items()
            }
        if self.plan.agreement.alone:
            return compile_program(graphs, self._own_plan(), kinds, settings)
        program = compile_program(graphs, self.plan, kinds, settings, units, self._layout, plans)
        self._layout = program.layout
        # where statistics are local, what is summed are the running ones, which weigh shares by their samples
        self._meets = program.meets_within(sums=self.job.batch_norm == "global")
        if varies and self._meets:
            program = replace(
                program, classes=tuple(replace(entry, same_sizes=True) for entry in program.classes)
            )
        return program

    def _own_plan(self) -> Plan:
        """The plan as a step sees it: a worker that meets nobody within a step is the only one."""
        return replace(self.plan, mesh=Mesh(axes=((DATA, 1),))) if self.plan.agreement.alone else self.plan

    def _resolve(self, graphs: Mapping[int, Graph], first: int) -> dict[int, Plan]:
        """Choose what the plan leaves open: parameters once for the run, ops for every size of a micro-batch."""
        if self._resolved_for is None:
            self.plan, self.choices = resolve_placements(
                graphs[first], self._written, self.job.build_optimizer
            )
            self._resolved_for = graphs[first].num_samples
        return {
            kind: self.plan
            if graph.num_samples == self._resolved_for
            else resolve_again(graph, self._written, self.plan, self.job.build_optimizer)
            for kind, graph in graphs.items()
        }

    @property
    def layout(self) -> Layout | None:
        """Where parameters are held, known once a step has been compiled; None: whole on every rank."""
        assert len(self._varying), "compile a step first: full_step()"
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
            entries = [
                ParameterShape(
                    value=Value.parameter(name),
                    shape=tuple(parameter.shape),
                    dtype=self._own_dtype(parameter),
                    trained=parameter.requires_grad,
                )
                for name, parameter in model.named_parameters()
            ]
            if self.plan.mesh.size > 1 and not self.plan.agreement.alone:
                entries += [
                    ParameterShape(
                        value=Value.buffer(name),
                        shape=tuple(buffer.shape),
                        dtype=torch.complex128 if buffer.is_complex() else torch.float64,
                        trained=False,
                    )
                    for name, buffer in model.named_buffers()
                ]
            self._parameters = tuple(entries)
        return self._parameters

    def _own_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """What a tensor of the model is in this run."""
        dtype = self.captures.dtype
        return dtype if dtype == torch.float64 and tensor.is_floating_point() else tensor.dtype

    def _opaque_notices(self, trial: Trial) -> tuple[str, ...]:
        assert self.capture_error is not None
        notices = [f"running eagerly: {self.capture_error.what}"]
        if not trial.weighs:
            notices.append(
                "the loss counts as a mean over its samples; return (total, weight) from `objective` to say otherwise."
            )
        if self.plan.mesh.size > 1:
            notices.append(
                "run eagerly, each rank's forward sees its own share alone: what looks across samples by itself "
                "(branches, state, hooks, norms of your own) is not that of one process. "
                "Losses, torch's batch norm and random numbers are."
                if self.job.batch_norm == "global" and trial.watched and not self.plan.agreement.alone
                else "run eagerly, each rank's forward sees its own share alone: batch norm, random numbers, and "
                "branches, state and hooks that depend on the batch, are not those of one process."
            )
        if trial.other_draws and self.plan.data_ranks > 1:
            notices.append(
                f"what {', '.join(trial.other_draws)} draw{'s' if len(trial.other_draws) == 1 else ''} depends on how "
                "the batch is shared."
            )
        if self.plan.memory.zero == 3 and self.plan.data_ranks > 1:
            notices.append("run eagerly, the model is whole on every rank while a micro-batch is computed.")
        return tuple(notices)
