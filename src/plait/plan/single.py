"""`single`: one rank, one device. The reference that every other plan is compared with."""

from plait.errors import PlanError
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan


def single(ranks: int) -> Plan:
    """Everything on one rank."""
    if ranks != 1:
        raise PlanError(
            f"plan single runs on 1 rank, not {ranks}.", fix="drop --ranks, or choose --plan ddp."
        )
    return Plan(name="single", mesh=Mesh(axes=((DATA, 1),)))
