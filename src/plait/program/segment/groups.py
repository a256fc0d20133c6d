"""Decide where parameters are held: pieces along axes by their placements, flat groups over `data` under ZeRO.

In: a graph, placements per axis, a plan. Out: a `Layout`. Groups follow the order in which the forward first uses
parameters, so that what is gathered together is used together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from plait.graph.graph import Graph
from plait.plan.plan import DATA, PIPE, Plan
from plait.program.layout import Group, Held, Layout
from plait.program.place.placement import R
from plait.program.place.propagate import Placements
from plait.program.stage.where import Stages


def make_layout(
    graph: Graph,
    placed: Sequence[Placements],
    plan: Plan,
    sums: Mapping[str, tuple[str, ...]],
    stages: Stages | None = None,
    partition: Mapping[str, object] | None = None,
) -> Layout:
    """How the parameters of `graph` are held under `plan`; `sums` names the axes over which each gradient is summed.

    `partition`, of several graphs of one model: parameters with different values share no group; false: never trained.
    """
    nodes = graph.nodes()
    parameters = {
        entry.name: Held(
            shape=tuple(nodes[entry.node].meta["val"].shape),
            placements=tuple(R if p.axis.name == DATA else p.of(nodes[entry.node]) for p in placed),
        )
        for entry in graph.inputs_of("parameter")
    }
    layout = Layout(mesh=plan.mesh, axes=tuple(p.axis for p in placed), parameters=parameters)
    if stages is not None:
        ranks = plan.mesh.size_of(PIPE)
        layout = replace(
            layout,
            owners={
                name: tuple(sorted({stage % ranks for stage in found}))
                for name, found in stages.parameters.items()
            },
            buffer_owners={name: stage % ranks for name, stage in stages.buffers.items()},
            starts=stages.starts,
            ops=stages.ops,
        )
    if plan.memory.zero == 0 or plan.data_ranks == 1:
        return layout
    return replace(
        layout, groups=_groups(graph, layout, plan, sums, stages, partition or {}), zero=plan.memory.zero
    )


def _groups(
    graph: Graph,
    layout: Layout,
    plan: Plan,
    sums: Mapping[str, tuple[str, ...]],
    stages: Stages | None,
    partition: Mapping[str, object],
) -> tuple[Group, ...]:
    nodes = graph.nodes()
    order = {node.name: index for index, node in enumerate(graph.graph.nodes)}
    first_use = {
        entry.name: min((order[user.name] for user in nodes[entry.node].users), default=len(order))
        for entry in graph.inputs_of("parameter")
    }
    limit = plan.sync.bucket_mib * 2**20
    coordinates = layout.coordinates(0)
    groups: list[Group] = []
    pending: list[str] = []
    key: object = None
    size = 0.0
    dtypes = {entry.name: nodes[entry.node].meta["val"].dtype for entry in graph.inputs_of("parameter")}

    def close() -> None:
        if pending:
            groups.append(
                Group(
                    parameters=tuple(pending),
                    shapes=tuple(layout.local_shape(name, coordinates) for name in pending),
                    dtype=dtypes[pending[0]],
                    chunks=plan.data_ranks,
                    trained=bool(partition.get(pending[0])) or pending[0] in graph.gradients,
                    owners=layout.owners.get(pending[0], (0,)),
                )
            )
            pending.clear()

    home = {name: stages.home(name) for name in stages.parameters} if stages is not None else {}
    for name in sorted(
        first_use,
        key=lambda name: (
            name not in graph.gradients,
            home.get(name, ()),
            str(partition.get(name)),
            first_use[name],
        ),
    ):
        own = (
            dtypes[name],
            sums.get(name),
            home.get(name),
            partition.get(name),
        )  # no sum: frozen, or not used by the loss
        if own != key or size >= limit:
            close()
            key, size = own, 0.0
        pending.append(name)
        size += prod(layout.local_shape(name, coordinates)) * dtypes[name].itemsize
    close()
    return tuple(groups)
