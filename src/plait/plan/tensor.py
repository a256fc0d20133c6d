"""`megatron` and `tensor`: weights cut over ranks, by the known pattern or by search; all ranks see the whole batch.

`megatron`: attention by heads, column then row parallel MLP, embedding and cross-entropy by vocabulary.
`tensor`: whatever communicates least in the memory that megatron would need.
"""

from plait.plan.decisions import Tensor
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, TENSOR, Plan


def megatron(ranks: int) -> Plan:
    """Weights cut over `ranks` ranks by pattern."""
    return Plan(
        name="megatron", mesh=Mesh(axes=((DATA, 1), (TENSOR, ranks))), tensor=Tensor(choice="megatron")
    )


def tensor(ranks: int) -> Plan:
    """Weights cut over `ranks` ranks by exact minimization of communication."""
    return Plan(name="tensor", mesh=Mesh(axes=((DATA, 1), (TENSOR, ranks))), tensor=Tensor(choice="auto"))
