"""What every rank does in a step, stage by stage and share by share.

In: graphs, placements, where parameters are held, what is summed over whom. Out: a `RankProgram` for each class of
ranks that do the same, and the class of each rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plait.errors import PlanError
from plait.graph.graph import Graph
from plait.job.updates.clip import Bound, Clip
from plait.job.updates.optimizer_state import Builder, optimizer_state
from plait.plan.offload import offload_shares
from plait.plan.plan import PIPE, Plan
from plait.program.cost.update import updated_of
from plait.program.layout import Layout
from plait.program.local.cross_entropy import without_log_probabilities
from plait.program.local.grouped_heads import with_grouped_heads
from plait.program.local.local_graph import LocalGraph
from plait.program.local.localize import localize
from plait.program.place.propagate import Placements
from plait.program.program import Bucket, RankProgram
from plait.program.segment.buckets import Ends, make_buckets
from plait.program.segment.cut import Piece
from plait.program.segment.gathers import groups_by_use
from plait.program.segment.own_views import with_own_views
from plait.program.segment.recompute import Again, recompute
from plait.program.segment.recompute_choice import checkpointed, choose
from plait.program.segment.split import StageGraph, split
from plait.program.segment.stage_pieces import MicroBatch, StagePieces, stage_pieces
from plait.program.segment.widen import widen_again
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.versions import versions
from plait.program.stage.where import Stages
from plait.program.write.build import StepBuilder
from plait.program.write.pipedream import Updates, shows_again
from plait.program.write.pipeline import PipelineWriter
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


class Ranks:
    """Compiles the ranks of one step."""

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

    def classes(self) -> tuple[tuple[RankProgram, ...], tuple[int, ...]]:
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
        if self.plan.compile != "off":
            local = widen_again(graph, local, stages)
        if self.plan.pipe.asynchronous:
            local = shows_again(graph, local, stages)
        if "parameters" in offload_shares(self.plan.memory.offload):
            local = with_own_views(graph, local, stages)
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
