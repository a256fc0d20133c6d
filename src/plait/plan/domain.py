"""`domain`: every sample cut over ranks, by rows of an image or positions of a sequence; weights are whole on all."""

from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, DOMAIN, Plan


def domain(ranks: int) -> Plan:
    """Samples cut over `ranks` ranks."""
    return Plan(name="domain", mesh=Mesh(axes=((DATA, 1), (DOMAIN, ranks))))
