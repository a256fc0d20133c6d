"""Plans that compute something else than one process does, on purpose: what, and what can be checked instead.

In: a plan. Out: why `single` is no reference for it; None where it is one. All ranks of such a plan run in one process
are the reference of its processes; its equations are checked against plain torch in the tests.
"""

from plait.plan.plan import Plan


def deviation_of(plan: Plan) -> str | None:
    """Why no run of one rank computes what all ranks of a plan do, though these always compute the same."""
    workers, average = plan.mesh.size, plan.average
    if plan.sync.compress != "none":
        return f"sync.compress={plan.sync.compress} is lossy"
    if plan.agreement.mix is None:
        return None
    if plan.agreement.mix == "elastic":
        return f"{plan.name} draws workers and their center to each other"
    if workers > 1:
        return f"{plan.name} lets each of {workers} workers train on its own share"
    if plan.agreement.mix == "outer" and (average.outer_lr, average.outer_momentum) != (1.0, 0.0):
        return f"{plan.name} makes outer steps (outer_lr={average.outer_lr}, outer_momentum={average.outer_momentum})"
    return None
