"""`zero1`, `zero2`, `zero3`: the batch cut over ranks as in `ddp`, and what every rank would hold alike cut as well.

zero1 shards the optimizer state, zero2 the gradients too, zero3 the parameters too: they are gathered just before they
are used and dropped after.
"""

from plait.plan.decisions import Memory
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan


def zero1(ranks: int) -> Plan:
    """Optimizer state sharded over `ranks` ranks."""
    return _zero(1, ranks)


def zero2(ranks: int) -> Plan:
    """Optimizer state and gradients sharded over `ranks` ranks."""
    return _zero(2, ranks)


def zero3(ranks: int) -> Plan:
    """Optimizer state, gradients and parameters sharded over `ranks` ranks."""
    return _zero(3, ranks)


def _zero(stage: int, ranks: int) -> Plan:
    return Plan(name=f"zero{stage}", mesh=Mesh(axes=((DATA, ranks),)), memory=Memory(zero=stage))
