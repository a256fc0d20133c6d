"""List what ranks exchange in a step, and the changes of placement for which they need not.

In: the local graph and the program of the first rank. Out: `Transfer`s with the op that asked for each.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from plait.program.instructions import Collective
from plait.program.local.communicate import COLLECTIVES, take_shard
from plait.program.local.functions import weighted_share
from plait.program.local.local_graph import Change, LocalGraph
from plait.program.place.op_keys import fold_path
from plait.program.place.propagate import Placements
from plait.program.program import Program
from plait.program.show.listing import Transfer
from plait.program.show.names import Names, folded
from plait.program.value import SQUARES, WEIGHT

_CHANGES = {
    "all_reduce": "P -> R", "reduce_scatter": "P -> S", "all_gather": "S -> R", "broadcast": "first -> R",
    "reduce": "P -> first",
}  # fmt: skip
"""What a collective makes of a placement; `first`: on the first rank alone."""


def local_changes(local: LocalGraph, chosen: Sequence[Placements], names: Names) -> tuple[Transfer, ...]:
    """Changes of placement for which ranks only take a part of what they have."""

    def rows() -> Iterator[Transfer]:
        seen: set[Change] = set()
        for node in local.graph.nodes:
            change = node.meta.get("change")
            if change is None or change in seen or node.target not in (take_shard, weighted_share):
                continue
            seen.add(change)
            axis = _axis_of_piece(change, chosen)
            yield _transfer(node, "none", axis, 0, change, chosen, names)

    return folded(rows())


def _axis_of_piece(change: Change, chosen: Sequence[Placements]) -> str:
    found = [
        p.axis.name
        for p, have, want in zip(chosen, change.have, change.want, strict=True)
        if have != want and p.axis.size > 1
    ]
    return "+".join(found)


def transfers(
    local: LocalGraph, chosen: Sequence[Placements], program: Program, names: Names
) -> tuple[Transfer, ...]:
    """What ops ask for in the first micro-batch, and what belongs to the step as a whole."""
    nodes = {node.name: node for node in local.graph.nodes if node.target in COLLECTIVES}

    def rows() -> Iterator[Transfer]:
        for instruction in program.of(0).instructions:
            if not isinstance(instruction, Collective):
                continue
            (made,) = instruction.writes[:1]
            node = nodes.get(made.name) if made.kind == "node" else None
            if node is None:
                yield _of_the_step(instruction, program)
            elif instruction.micro_batch == 0:
                change = node.meta.get("change")
                yield _transfer(
                    node, instruction.op, instruction.axis, instruction.num_bytes, change, chosen, names
                )

    return folded(rows())


def _transfer(
    node: fx.Node,
    collective: str,
    axis: str,
    num_bytes: int,
    change: Change | None,
    chosen: Sequence[Placements],
    names: Names,
) -> Transfer:
    phase, source = node.meta.get("phase", ""), node.meta.get("source", "")
    if change is None:
        user = names(names.nodes[node.meta["lowers"]])
        what, text = "its own", ""
    else:
        axes = [p.axis.name for p in chosen]
        steps = [(change.have[axes.index(name)], change.want[axes.index(name)]) for name in axis.split("+")]
        what, text = names(change.tensor), ", ".join(f"{have} -> {want}" for have, want in steps)
        user = names(change.user) if change.user is not None and change.user != change.tensor else ""
    return Transfer(
        collective=collective,
        axis=axis,
        num_bytes=num_bytes,
        count=1,
        what=what,
        change=text,
        user=user,
        phase=phase,
        module=fold_path(node.meta.get("module", ""), names.blocks),
        source=source,
    )


def _of_the_step(instruction: Collective, program: Program) -> Transfer:
    """Communication that no op of the graph asks for: gradients, parameters of zero3, scalars."""
    source, own = instruction.reads[0], program.of(0)
    if source.kind in ("bucket", "shard", "packed"):
        bucket = own.buckets[source.number]
        scalars = [f"the {name} of the loss" for name in bucket.scalars]
        members = [f"gradients of {len(bucket.parameters)} parameters"] if bucket.parameters else []
        what = " and ".join([*members, *scalars]) + (", compressed" if source.kind == "packed" else "")
    elif source.kind == "chunk":
        what = f"{len(program.layout.groups[source.number].parameters)} parameters"
    elif source.kind == "average":
        what = f"weights {source.number}"
    else:
        what = {WEIGHT: "the weight of the loss", SQUARES: "the norm of all gradients"}.get(
            source, str(source)
        )
    change = _CHANGES[instruction.op]
    change = "P -> R" if source.kind == "packed" else change
    phase = "update" if instruction.micro_batch is None else ""
    return Transfer(
        collective=instruction.op,
        axis=instruction.axis,
        num_bytes=instruction.num_bytes,
        count=1,
        what=what,
        change=change,
        user="",
        phase=phase,
        module="",
        source="",
    )
