"""`threads`: one process, a replica of the model on a thread each; the first one holds what is trained.

What torch.nn.DataParallel does. Every step the batch is scattered, the weights are replicated, losses are gathered and
gradients are reduced, all by the first replica, which updates alone. `ddp` computes the same, and needs no more code.
"""

from plait.plan.decisions import Sync
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan


def threads(ranks: int) -> Plan:
    """The batch cut over `ranks` threads of one process."""
    return Plan(name="threads", mesh=Mesh(axes=((DATA, ranks),)), sync=Sync(rule="threads"))
