"""Compile (graphs, plan) into a Program: what every rank does in one training step.

In: one captured graph per micro-batch size (or the names of an uncapturable model's parameters), a resolved plan, the
sizes of the micro-batches. Out: a checked `Program`. Rooms below do one step each (place, local, stage, segment, write,
check); here is their order, and what they hand on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.graph.ops.beside import parameters_beside
from plait.job.order import shares as equal_shares
from plait.job.updates.clip import Bound, Clip
from plait.job.updates.optimizer_state import Builder, optimizer_state
from plait.plan.offload import offload_shares
from plait.plan.plan import PIPE, Plan
from plait.program.check.soundness import check_program
from plait.program.check.written import refuse_written
from plait.program.cost.update import updated_of
from plait.program.layout import Layout
from plait.program.local.cross_entropy import without_log_probabilities
from plait.program.local.ends import ends_of
from plait.program.local.grouped_heads import with_grouped_heads
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.place import place
from plait.program.place.propagate import Placements
from plait.program.program import Bucket, Program, RankProgram
from plait.program.segment.buckets import SCALARS, Ends, make_buckets, scalar, sums_of
from plait.program.segment.cut import Piece
from plait.program.segment.gathers import groups_by_use
from plait.program.segment.groups import make_layout
from plait.program.segment.recompute import Again, recompute
from plait.program.segment.recompute_choice import checkpointed, choose
from plait.program.segment.split import StageGraph, split
from plait.program.segment.stage_pieces import MicroBatch, StagePieces, stage_pieces
from plait.program.segment.stage_sizes import stages_of
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.versions import notices_of, versions
from plait.program.stage.where import Stages
from plait.program.write import compression
from plait.program.write.averaging import Flat, with_averaging
from plait.program.write.build import StepBuilder
from plait.program.write.pipedream import Updates, check_suits, shows_again
from plait.program.write.pipeline import PipelineWriter
from plait.program.write.push_pull import SERVERS, with_servers
from plait.program.write.replicas import with_replicas
from plait.program.write.spill import Away, part_bytes
from plait.program.write.step_pieces import early_pieces, ends_of_buckets, step_pieces

_CUTS = 24
"""Pieces in which a forward is cut, about, where its activations leave piece by piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the job contributes to a program beside its graph."""

    clip_norm: Bound
    batch_norm: str
    device: torch.device
    clip_value: Bound = None
    build_optimizer: Builder | None = None
    """Makes the job's optimizer, whose state counts as memory; None: memory without an optimizer."""
    partition: Mapping[str, object] = field(default_factory=dict)
    """Of several objectives: parameters with different values here are not trained together."""

    may_skip: bool = False
    """Whether a step may be given up once its gradients are known."""
    whole_tensors: bool = False
    """Whether the optimizer needs all of a tensor: ZeRO then cuts between parameters, not within them."""

    @property
    def clip(self) -> Clip:
        """How gradients are bounded."""
        return Clip.of(self.clip_norm, self.clip_value)


def compile_program(
    graphs: Mapping[int, Graph],
    plan: Plan,
    micro_batches: Sequence[int],
    settings: Settings,
    shares: Sequence[tuple[int, ...]] | None = None,
    layout: Layout | None = None,
    plans: Mapping[int, Plan] | None = None,
) -> Program:
    """Compile one step of `micro_batches`: the key of the graph of each, which may be its number of samples.

    `shares` are the samples of each rank of `data`, nearly equal where not given; `layout` is where the run already
    holds its parameters; `plans` are the plans of micro-batches for whose size ops were chosen anew.
    """
    source = graphs[micro_batches[0]]
    refuse_written(plan, source.written, has_masters=source.precision == "bf16-weights")
    given = (
        tuple(shares)
        if shares is not None
        else tuple(equal_shares(graphs[key].num_samples, plan.data_ranks) for key in micro_batches)
    )
    chosen = {
        (size, units): place(graphs[size], (plans or {}).get(size, plan), units)
        for size, units in dict.fromkeys(zip(micro_batches, given, strict=True))
    }
    first, placed = graphs[micro_batches[0]], chosen[(micro_batches[0], given[0])]
    ends = [ends_of(first, p, plan) for p in placed]
    sums = sums_of(first, ends, [p.axis for p in placed])
    if plan.agreement.weights == "server":
        sums = dict.fromkeys(sums, (SERVERS,))
    stages = stages_of(graphs, plan, micro_batches, layout, settings.build_optimizer)
    if plan.pipe.asynchronous:
        check_suits(plan, graphs, settings.clip, stages)
    if stages:
        sums |= {name: (PIPE, *sums[name]) for name in map(scalar, SCALARS)}
    if layout is None:
        layout = make_layout(first, placed, plan, sums, stages.get(micro_batches[0]), settings.partition)
        if settings.whole_tensors or any(graph.conditional for graph in graphs.values()):
            # of a gradient that may be absent, one rank alone has to know
            layout = replace(layout, groups=tuple(replace(group, whole=True) for group in layout.groups))
    compiler = _Compiler(graphs, chosen, plan, micro_batches, given, ends, sums, layout, settings, stages)
    classes, members = compiler.ranks()
    weights = [graphs[size].static_weight for size in micro_batches]
    program = Program(
        plan=plan,
        micro_batches=tuple(graphs[key].num_samples for key in micro_batches),
        shares=given,
        classes=classes,
        members=members,
        layout=layout,
        gathered=tuple(entry for p in placed if p.axis.size > 1 for entry in p.gathered),
        notices=first.notices,
        total_weight=None if None in weights else float(sum(w for w in weights if w is not None)),
        conditional=frozenset().union(*(graph.conditional for graph in graphs.values())),
        beside=parameters_beside(first),
    )
    check_program(program)
    told = notices_of(program) if plan.pipe.asynchronous else compression.notices_of(program)
    return replace(program, notices=(*program.notices, *told))


def complete(
    program: Program, plan: Plan, flats: Sequence[Flat] = (), fragments: Sequence[int] = ()
) -> Program:
    """A step of all ranks of a plan, servers included, from what its workers compute.

    Of workers that meet nobody within a step, `program` is what one of them does. Threads of one process have parts of
    their own in a step that all would do alike. `flats` are what they mix now and
    then, `fragments` what of it is due in this step.
    """
    made = program
    if plan.agreement.alone:
        made = replace(made, plan=plan, members=(0,) * plan.mesh.size)
    if flats:
        made = with_averaging(made, flats, fragments)
    made = with_replicas(with_servers(made))
    if flats or made.members != program.members:
        check_program(made)
    return made


class _Compiler:
    def __init__(
        self,
        graphs: Mapping[int, Graph],
        chosen: Mapping[tuple[int, tuple[int, ...]], tuple[Placements, ...]],
        plan: Plan,
        micro_batches: Sequence[int],
        shares: Sequence[tuple[int, ...]],
        ends: Ends,
        sums: Mapping[str, tuple[str, ...]],
        layout: Layout,
        settings: Settings,
        stages: Mapping[int, Stages],
    ) -> None:
        self.graphs, self.chosen, self.plan = graphs, chosen, plan
        self.micro_batches, self.shares, self.ends = micro_batches, shares, ends
        self.sums, self.layout, self.settings, self.stages = sums, layout, settings, stages
        self.again: dict[tuple[int, tuple[int, ...]], Again] = {}
        self._parts: dict[object, tuple[LocalGraph, tuple[StageGraph, ...]]] = {}

    def ranks(self) -> tuple[tuple[RankProgram, ...], tuple[int, ...]]:
        """What each class of ranks with equal stages and shares does, and the class of each rank."""
        plan = self.plan
        classes: list[RankProgram] = []
        index_of: dict[object, int] = {}
        members = []
        for rank in range(plan.mesh.size):
            shares = tuple(units[plan.data_coordinate(rank)] for units in self.shares)
            own = (plan.mesh.coordinate(rank, PIPE), shares)
            if own not in index_of:
                index_of[own] = len(classes)
                classes.append(self.rank(rank))
            members.append(index_of[own])
        return tuple(classes), tuple(members)

    def rank(self, rank: int) -> RankProgram:
        """What the ranks with the same samples and stages as `rank` do."""
        coordinate, settings = self.plan.mesh.coordinate(rank, PIPE), self.settings
        first = self.graphs[self.micro_batches[0]]
        stages = self.stages.get(self.micro_batches[0])
        home = {name: stages.home(name) for name in stages.parameters} if stages is not None else None
        size = part_bytes(self.plan, _parameter_bytes(first))
        buckets = make_buckets(first, self.sums, self.layout, self.plan, home, coordinate, size)
        builder = StepBuilder(
            self.plan, buckets, self.layout, settings.clip, settings.device, coordinate, self._away(rank)
        )
        if self.stages:
            self._pipeline(builder, rank, coordinate).write()
            return builder.close()
        done: dict[tuple[int, tuple[int, ...]], tuple[LocalGraph, list[Piece], list[Piece]]] = {}
        for number, key in enumerate(zip(self.micro_batches, self.shares, strict=True)):
            graph = self.graphs[key[0]]
            if key not in done:
                local = self._localize(key, rank)
                done[key] = (
                    local, *step_pieces(
                        graph, local, buckets, self.layout, f"{len(done)}.", settings.device, self._used(graph)
                    )
                )  # fmt: skip
            builder.add_micro_batch(graph, *done[key], number)
        return builder.finish()

    def _used(self, graph: Graph) -> dict[str, int]:
        """Groups of parameters at which a step is cut, where activations or parameters do not stay."""
        if not {"activations", "parameters"} & set(offload_shares(self.plan.memory.offload)):
            return {}
        return groups_by_use(graph, _parameter_bytes(graph) / _CUTS)

    def _away(self, rank: int) -> Away | None:
        """What of a rank's step lies on the host."""
        shares, settings, first = (
            offload_shares(self.plan.memory.offload),
            self.settings,
            self.graphs[self.micro_batches[0]],
        )
        if not shares:
            return None
        if "parameters" in shares and 0 < self.layout.zero < 3:
            raise PlanError(
                f"memory.offload: with memory.zero={self.layout.zero} every rank computes with all parameters, "
                "which stay.",
                fix="set memory.zero=3, or leave parameters out of memory.offload.",
            )
        used = self._used(first)
        late = first.static_weight is None and not first.weight_is_early
        place, build = self.plan.data_coordinate(rank), settings.build_optimizer

        def state_bytes(bucket: Bucket) -> int:
            return 0 if build is None else optimizer_state(build, updated_of(bucket, place)).num_bytes

        return Away(
            shares=shares,
            state_bytes=state_bytes,
            groups={entry.name: used[entry.node] for entry in first.inputs_of("parameter") if used},
            update_is_late=late or bool(settings.clip) or settings.may_skip,
        )

    def _localize(self, key: tuple[int, tuple[int, ...]], rank: int) -> LocalGraph:
        local = localize(
            self.graphs[key[0]],
            self.chosen[key],
            self.layout.coordinates(rank),
            local_batch_norm=self.settings.batch_norm == "local",
            ends=self.ends,
            stages=self.stages.get(key[0]),
        )
        without_log_probabilities(local.graph)
        with_grouped_heads(local.graph)
        setting, graph, stages = self.plan.memory.recompute, self.graphs[key[0]], self.stages.get(key[0])
        if setting != "none" or checkpointed(local):
            if (
                key not in self.again
            ):  # the first rank chooses for all: they fetch parameters at the same places
                self.again[key] = choose(graph, local, setting, stages)
            local = recompute(graph, local, self.again[key], stages)
        if self.plan.pipe.asynchronous or "parameters" in offload_shares(self.plan.memory.offload):
            return shows_again(graph, local, stages)
        return local

    def _split(
        self, key: tuple[int, tuple[int, ...]], rank: int
    ) -> tuple[LocalGraph, tuple[StageGraph, ...]]:
        """A micro-batch by stages: the same for all ranks that differ on `pipe` alone."""
        known = (key, self.layout.coordinates(rank))
        if known not in self._parts:
            local = self._localize(key, rank)
            self._parts[known] = (local, split(local, self.stages[key[0]], self.plan.mesh.size_of(PIPE)))
        return self._parts[known]

    def _pipeline(self, builder: StepBuilder, rank: int, coordinate: int) -> PipelineWriter:
        pipe, ranks = self.plan.pipe, self.plan.mesh.size_of(PIPE)
        schedule = SCHEDULES["1f1b" if pipe.asynchronous else pipe.schedule]
        by_rank = schedule(ranks, pipe.per_rank, len(self.micro_batches))
        actions = by_rank[coordinate]
        apart = any(action.kind == "weight" for action in actions)
        done: dict[object, tuple[LocalGraph, list[Piece], dict[int, StagePieces]]] = {}
        micro = []
        for number, key in enumerate(zip(self.micro_batches, self.shares, strict=True)):
            graph = self.graphs[key[0]]
            if key not in done:
                (local, parts), prefix = self._split(key, rank), f"{len(done)}."
                early = early_pieces(graph, local, prefix, self.settings.device, {})
                own = {
                    part.stage: stage_pieces(
                        part, local, ends_of_buckets(part, local, builder.buckets), prefix,
                        self.settings.device, apart=apart, used=self._used(graph),
                    )
                    for part in parts
                    if part.stage % ranks == coordinate
                }  # fmt: skip
                done[key] = (local, early, own)
            local, early, own = done[key]
            micro.append(MicroBatch(graph=graph, local=local, early=early, stages=own, number=number))
        updates = None
        if pipe.asynchronous:
            seen = versions(by_rank, coordinate, vertical_sync=pipe.vertical_sync)
            updates = Updates(builder, micro, actions, seen)
        return PipelineWriter(builder, micro, by_rank, coordinate, updates)


def _parameter_bytes(graph: Graph) -> int:
    nodes = graph.nodes()
    return sum(int(nodes[node].meta["val"].nbytes) for node in graph.gradients.values())
