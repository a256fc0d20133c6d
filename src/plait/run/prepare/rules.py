"""Refuse update rules that mean nothing under a plan, before any process starts.

In: a job and a plan. Out: nothing, or a `PlanError` that says why.
"""

from plait.errors import PlanError
from plait.job.job import Job
from plait.plan.plan import Plan

_MARCHING = "use a plan whose workers march in step, such as ddp, zero3 or server-sync"


def check_rules(job: Job, plan: Plan) -> None:
    """Raise where the plan has no moment at which all ranks are at the same step of the same weights."""
    agreement = plan.agreement
    together = agreement.marches and agreement.mix is None
    in_turn = agreement.weights == "server" and agreement.order == "step"
    if job.freeze and not (together or in_turn):
        raise PlanError(
            f"freeze names a step from which parameters are trained; under plan {plan.name} workers are at different "
            "steps, or mix weights between them, and have no such step in common.",
            fix=f"{_MARCHING}.",
        )
