"""`ddp`: every rank holds the model and a share of the batch; gradients are summed in buckets during the backward."""

from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan


def ddp(ranks: int) -> Plan:
    """The batch cut over `ranks` ranks."""
    return Plan(name="ddp", mesh=Mesh(axes=((DATA, ranks),)))
