"""Parameters that the forward itself writes into: plans that hold them whole follow, others are refused.

In: a plan, the names. Out: nothing, or a `PlanError`. A write (a teacher that follows its student, weights that are
clamped, rows that are scaled to a norm) is a value of the step like a buffer's; where ranks hold cuts of a parameter,
or get it from servers, it would be lost.
"""

from collections.abc import Sequence

from plait.errors import PlanError
from plait.plan.plan import Plan


def refuse_written(
    plan: Plan, names: Sequence[str], *, eagerly: bool = False, has_masters: bool = False
) -> None:
    """`eagerly`: the model is not captured, so a rank writes what its own share of the batch makes of them.

    `has_masters`: the optimizer has copies of its own, from which it writes the weights anew.
    """
    if not names:
        return
    if has_masters:
        raise PlanError(
            f"the forward writes into {names[0]}, which precision='bf16-weights' makes anew from its master.",
            fix="use precision='bf16' or 'fp32'.",
        )
    whole = plan.mesh.size == plan.data_ranks and plan.memory.zero == 0 and plan.agreement.weights != "server"
    if whole and (plan.mesh.size == 1 or not eagerly):
        return
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    why = (
        "run eagerly, each rank would write what its own share makes of it"
        if whole
        else "what a plan cuts, or keeps on servers, cannot be written to by a forward"
    )
    raise PlanError(
        f"the forward writes into {'a parameter' if len(names) == 1 else 'parameters'}, {shown}; "
        f"under plan {plan.name}, {why}.",
        fix=f"use plan single{'' if eagerly else ', ddp or local-sgd'}, or keep in buffers what the forward changes; "
        "for averages of weights, let the job say average=.",
    )
