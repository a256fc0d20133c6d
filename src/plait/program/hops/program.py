"""One collective as a whole program, which the checker proves, the simulator runs and every interpreter executes.

In: an operation, an algorithm, ranks, bytes. Out: a `Program` of one step. Block b of the tensor is `Value.block(b)`.
"""

from plait.plan.mesh import Mesh
from plait.plan.plan import Plan
from plait.program.check.soundness import check_program
from plait.program.hops.algorithms import rounds_of
from plait.program.hops.rounds import AXIS, block_sizes, instructions
from plait.program.layout import Layout
from plait.program.program import Program, RankProgram


def collective_program(
    operation: str, algorithm: str, ranks: int, num_bytes: int, *, root: int = 0, hosts: int = 1
) -> Program:
    """A collective on a tensor of `num_bytes`, checked; of an all_to_all, that is what one rank sends in all."""
    rounds = rounds_of(operation, algorithm, ranks, root=root, hosts=hosts)
    sizes = block_sizes(num_bytes, ranks)
    if operation == "all_to_all":
        sizes = sizes * ranks
    mesh = Mesh(axes=((AXIS, ranks),))
    entries = [
        RankProgram(instructions=own, buckets=(), segments={}, values={}, constants={})
        for own in instructions(rounds, ranks, sizes)
    ]
    program = Program(
        plan=Plan(name=f"{operation} by {algorithm}", mesh=mesh),
        micro_batches=(),
        shares=(),
        classes=tuple(entries),
        members=tuple(range(ranks)),
        layout=Layout(mesh=mesh, axes=(), parameters={}),
        gathered=(),
        notices=(),
        total_weight=None,
    )
    check_program(program)
    return program
