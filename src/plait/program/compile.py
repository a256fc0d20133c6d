"""Compile (graphs, plan) into a Program: what every rank does in one training step.

In: one captured graph per micro-batch size (or the names of an uncapturable model's parameters), a resolved plan, the
sizes of the micro-batches. Out: a checked `Program`. Rooms below do one step each (place, local, stage, segment, write,
check); here is their order, and what they hand on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.graph.graph import Graph
from plait.graph.ops.beside import parameters_beside
from plait.job.order import shares as equal_shares
from plait.plan.plan import PIPE, Plan
from plait.program.check.soundness import check_program
from plait.program.check.written import refuse_written
from plait.program.layout import Layout
from plait.program.local.ends import ends_of
from plait.program.place.place import place
from plait.program.program import Program
from plait.program.ranks import Ranks, Settings
from plait.program.segment.buckets import SCALARS, scalar, sums_of
from plait.program.segment.groups import make_layout
from plait.program.segment.stage_sizes import stages_of
from plait.program.stage.versions import notices_of
from plait.program.write import compression
from plait.program.write.averaging import Flat, with_averaging
from plait.program.write.pipedream import check_suits
from plait.program.write.push_pull import SERVERS, with_servers
from plait.program.write.replicas import with_replicas


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
    ranks = Ranks(graphs, chosen, plan, micro_batches, given, ends, sums, layout, settings, stages)
    classes, members = ranks.classes()
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
