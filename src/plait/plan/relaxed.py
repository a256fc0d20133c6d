"""`server-sync`, `server-async`, `server-stale`, `hogwild`, `easgd`, `local-sgd`, `diloco`: workers that do not wait.

Each worker's share of the batch is a step of its own (but for server-sync); they differ in how weights meet. Servers
count among the ranks: of 4 ranks with one server, 3 are workers.
"""

from plait.plan.decisions import Average, Sync
from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan


def server_sync(ranks: int) -> Plan:
    """A server sums the gradients of all workers and applies one update a step: what ddp computes."""
    return _served("server-sync", ranks)


def server_async(ranks: int) -> Plan:
    """A server applies every worker's gradients as they come; nobody waits."""
    return _served("server-async", ranks)


def server_stale(ranks: int) -> Plan:
    """As server-sync, but a worker may be some steps ahead of the slowest, on weights that are as old at most."""
    return _served("server-stale", ranks, staleness=3)


def hogwild(ranks: int) -> Plan:
    """Processes of one host write to one model in shared memory, without locks."""
    return _alone("hogwild", ranks)


def easgd(ranks: int) -> Plan:
    """Workers explore on their own, held together by springs to a center that one more rank holds."""
    mesh = Mesh(axes=((DATA, max(1, ranks - 1)),))
    return Plan(name="easgd", mesh=mesh, sync=Sync(rule="easgd", servers=1))


def local_sgd(ranks: int) -> Plan:
    """Workers train on their own; weights are averaged every so many steps."""
    return _alone("local-sgd", ranks)


def diloco(ranks: int) -> Plan:
    """As local-sgd, with an outer optimizer on what has changed on average."""
    plan = _alone("diloco", ranks)
    return Plan(name=plan.name, mesh=plan.mesh, sync=plan.sync, average=Average(every=50))


def _served(rule: str, ranks: int, staleness: int = 0) -> Plan:
    mesh = Mesh(axes=((DATA, max(1, ranks - 1)),))
    return Plan(name=rule, mesh=mesh, sync=Sync(rule=rule, servers=1, staleness=staleness))


def _alone(rule: str, ranks: int) -> Plan:
    return Plan(name=rule, mesh=Mesh(axes=((DATA, ranks),)), sync=Sync(rule=rule))
