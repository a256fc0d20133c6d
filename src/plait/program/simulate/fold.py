"""Ranks that do the same at the same time, of which one stands for all.

In: a program. Out: for each rank the one that represents it. Ranks of one class run one list of instructions; where the
durations do not depend on more than the class, their clocks agree, so a simulator need not look at them all. A class
whose representative would exchange messages with a rank that represents nobody cannot be folded: then no rank is. Nor
is any where it matters who comes first: with servers, or where workers take what is next.
"""

from plait.program.instructions import Recv, Send
from plait.program.program import Program


def representatives(program: Program) -> tuple[int, ...]:
    """The representative of every rank: the first of its class."""
    plan, first = program.plan, dict[int, int]()
    if len(program.members) > plan.mesh.size or plan.agreement.takes_next:
        return tuple(range(len(program.members)))
    for rank, entry in enumerate(program.members):
        first.setdefault(entry, rank)
    if not _is_closed(program, frozenset(first.values())):
        return tuple(range(len(program.members)))
    return tuple(first[entry] for entry in program.members)


def _is_closed(program: Program, chosen: frozenset[int]) -> bool:
    mesh = program.plan.mesh
    for rank in chosen:
        ends = {
            (i.axis, i.to if isinstance(i, Send) else i.source)
            for i in program.of(rank).instructions
            if isinstance(i, Send | Recv)
        }
        groups = {axis: mesh.group(rank, axis) for axis, _ in ends}
        if any(groups[axis][at] not in chosen for axis, at in ends):
            return False
    return True
