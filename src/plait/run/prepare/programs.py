"""The programs of a run: one per shape of a step, captured and compiled when the shape first occurs.

In: a job, a plan, the shapes of a step. Out: a `Program`. A model that cannot be captured gets programs with opaque
instructions, and the reason is kept for the user.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from plait.errors import CaptureError, JobError
from plait.graph.batch import check_samples
from plait.graph.capture.capture import LeafShapes
from plait.graph.from_job import Captures
from plait.job.data.open import Source
from plait.job.data.reader import Rows
from plait.job.data.share import Share
from plait.job.job import Job
from plait.latest import Latest
from plait.plan.plan import Plan
from plait.program.compile import complete
from plait.program.layout import Layout
from plait.program.program import Program
from plait.program.write.averaging import Flat, flats_of
from plait.run.hold.holding import Holding
from plait.run.hold.server_shards import server_layout
from plait.run.link.links import Links, NoLinks
from plait.run.prepare.step_compiler import StepCompiler
from plait.run.prepare.varying import Varying

_CUTS = 32
"""Ways to cut a step whose programs are kept."""
_TOLD_AT = 3
"""Shapes that are compiled one by one before the user is told."""
_OF_ONE = "a dim of extent 1 is computed with in ways of its own, and some batch of the step has one"
"""Why one program that was found serves not these shapes."""


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
        *,
        several: bool = False,
    ) -> None:
        """`job` has one objective; of a job with several, each has programs of its own (`several`)."""
        self.job = self.whole = job
        self.parts: tuple[Programs, ...] = (self,)
        """Those of each objective; `whole` is the job of all of them."""
        self.device = device
        self.captures = captures if captures is not None else Captures(job, source, dtype, device.type)
        self.compiler = StepCompiler(job, plan, self.captures, device, several=several)
        """Of one step after the other."""
        self.held_out: Source | None = None
        """The job's evaluation data, opened."""
        self._varying = Latest[Any, Varying](_CUTS)
        """By how a step is cut."""
        self._told_shapes = False
        self._news: list[str] = []
        self._plain: Program | None = None
        """What workers compute in some step, without averages and servers."""
        self._averaged: tuple[Flat, ...] | None = None
        self._frozen: dict[frozenset[str], Programs] = {}
        """Those of steps in which some parameters are frozen, by which."""

    @classmethod
    def several(
        cls, job: Job, source: Source, plan: Plan, device: torch.device, dtype: torch.dtype
    ) -> "Programs":
        """Those of the first objective, which lead to all others; parameters are held alike by all."""
        parts = job.parts()
        made = tuple(cls(part, source, plan, device, dtype, several=len(parts) > 1) for part in parts)
        for one in made:
            one.parts, one.whole = made, job
        return made[0]

    def hold_whole_tensors(self) -> None:
        """Compile anew, with ZeRO's cuts between parameters."""
        self.compiler.whole_tensors, self.compiler.layout, self._plain = True, None, None
        self._varying = Latest[Any, Varying](_CUTS)

    def at(self, step: int) -> "Programs":
        """Those of the objective whose turn a step is, without gradients of what is frozen in it."""
        part = self.parts[self.whole.turn(step).objective]
        return part._while_frozen(step) if self.whole.freeze else part

    def _while_frozen(self, step: int) -> "Programs":
        """Those without gradients of what is frozen; all gradients where something is kept by them between steps."""
        trained, plan = self.trained, self.plan
        untrained = self.whole.frozen_in(step, trained)
        keeps = plan.agreement.weights == "server" or plan.pipe.asynchronous or plan.sync.compress != "none"
        if self.capture_error is not None or keeps or not untrained or untrained == trained:
            return self
        if untrained not in self._frozen:
            made = self._frozen[untrained] = copy(self)
            made.compiler, made._varying = self.compiler.without(untrained), Latest[Any, Varying](_CUTS)
            made._news, made._plain = [], None
        return self._frozen[untrained]

    @property
    def plan(self) -> Plan:
        """Once a step has been compiled, with what it left open."""
        return self.compiler.plan

    @property
    def choices(self) -> tuple[str, ...]:
        """How what the plan left open was chosen, and what was rewritten."""
        return (*self.compiler.rewrites, *self.compiler.choices)

    @property
    def capture_error(self) -> CaptureError | None:
        """Why the model runs eagerly; None: it does not."""
        return self.compiler.capture_error

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
                step = self.compiler.compile(units, shapes, varies) if units else self._empty()
                self._plain = self._plain or step
                return complete(step, self.plan, self._flats(), fragments)

            seen = self.captures.seen if shares else ()
            simplify = self.compiler.leave_as_written
            varying = Varying(build, len(units), seen, self._allow_variation, simplify)
            self._varying.put(key, varying)
        if self.capture_error is not None:  # what runs eagerly takes any shape
            return varying.any() or varying.of(())
        for share in shares:
            if share.ids:
                check_samples(self.captures.layout, share.batch, share.ids)
        shapes = tuple(self.captures.extents(share.batch) for share in shares)
        try:
            program = varying.of(shapes)
        except CaptureError as error:
            self.compiler.give_up(error, shapes)
            return self.for_step(shares, fragments)
        if varying.num_single >= _TOLD_AT and not self._told_shapes:
            self._told_shapes = True
            self._news.append(
                f"{varying.num_single} shapes of a batch so far, each captured and compiled anew, because "
                f"{varying.reason or _OF_ONE}. Fix: let `collate` pad to a few sizes, such as multiples of 64."
            )
        return program

    @property
    def trained(self) -> frozenset[str]:
        """Parameters that get gradients in some step, on whatever rank."""
        entries = (entry for own in self.full_step().classes for entry in own.buckets)
        return frozenset(name for bucket in entries for name in bucket.parameters)

    @property
    def rows(self) -> Rows | None:
        """How shares are taken out of whole micro-batches, where ranks must be padded alike; None: they need not."""
        alike = (entry.same_sizes for part in self.parts for entry in part.full_step().classes)
        return self.captures.layout.rows if any(alike) else None

    def news(self) -> list[str]:
        """What the user should know since this was asked last."""
        found, self._news = self._news, []
        return found

    def _allow_variation(self) -> None:
        """Called when a shape is unlike all that were seen before the run."""
        together = self.plan.data_ranks > 1 and not self.plan.agreement.alone
        if together and self.capture_error is None and self.compiler.meets:
            raise JobError(
                "batches have several shapes, unlike those that were looked at first, and ranks exchange what they "
                "compute on them, for batch statistics or whole tensors.",
                fix="let `collate` pad all samples to one shape.",
            )
        if together and self.capture_error is None and self.compiler.is_static:
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
            buffers = {
                name: b.to(self.compiler.opaque.dtype_of(b))
                for name, b in self.job.build_model().named_buffers()
            }
        else:
            graph = self.captures.latest(self._first().micro_batches[0])
            nodes = graph.nodes()
            given = {entry.name: nodes[entry.node].meta["val"] for entry in graph.inputs_of("buffer")}
            buffers = {name: given[name] for name in graph.new_buffers if name in given}
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

    @property
    def layout(self) -> Layout | None:
        """Where parameters are held, known once a step has been compiled; None: whole on every rank."""
        assert len(self._varying), "compile a step first: full_step()"
        layout = self.compiler.layout
        return None if layout is None or layout.is_whole else layout

    def holding(self, rank: int, links: Links, device: torch.device) -> Holding | None:
        """What a rank holds of the parameters; None: all."""
        servers = self.plan.sync.servers
        if rank >= self.plan.mesh.size and servers > 1:
            named = dict(self.job.build_model().to(self.captures.dtype).named_parameters())
            cut = server_layout(self.full_step().buckets, named, servers)
            return Holding(cut, rank - self.plan.mesh.size, NoLinks(), device)
        layout = self.layout if rank < self.plan.mesh.size else None
        return Holding(layout, rank, links, device) if layout is not None else None
