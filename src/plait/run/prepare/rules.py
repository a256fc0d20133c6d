"""Refuse update rules, stragglers and networks that mean nothing under a plan, before any process starts.

In: a job and a plan. Out: nothing, or a `PlanError` that says why.
"""

from collections.abc import Mapping

import torch

from plait.errors import JobError, PlanError, UsageError
from plait.graph.graph import Graph
from plait.job.job import Job
from plait.job.updates.follow import TRAIN_LOSS
from plait.options import Emulation
from plait.plan.plan import PIPE, Plan

_MARCHING = "use a plan whose workers march in step, such as ddp, zero3 or server-sync"


def check_follows(job: Job, plan: Plan) -> None:
    """Raise where a schedule follows what nobody measures, or not all ranks alike."""
    if not plan.agreement.marches or (job.follow == TRAIN_LOSS and plan.agreement.alone):
        raise PlanError(
            f"the learning rate follows {job.follow or 'evaluations'}, which under plan {plan.name} is not measured at "
            "a moment that all workers share.",
            fix=f"{_MARCHING}; or a schedule by the step.",
        )
    if job.follow not in (TRAIN_LOSS, None) and job.evaluate is None:
        raise JobError(
            f"the learning rate follows {job.follow} of evaluations, and there is no data to evaluate on.",
            fix=f"give evaluate=, or follow='{TRAIN_LOSS}'.",
        )


def check_alike(shapes: Mapping[str, torch.Size], graph: Graph | None) -> None:
    """Raise where a model had these shapes and then others: ranks would not have what was captured."""
    if graph is None:
        return
    nodes = graph.nodes()
    for entry in graph.inputs_of("parameter"):
        before, captured = shapes.get(entry.name), nodes[entry.node].meta["val"].shape
        if before is not None and before != captured:
            raise JobError(
                f"model() builds another network each time: {entry.name} was {list(before)}, then {list(captured)}.",
                fix="let it depend on the seed and its arguments alone: each rank builds it.",
            )


def check_rules(job: Job, plan: Plan) -> None:
    """Raise where the plan has no moment at which all ranks are at the same step of the same weights."""
    agreement = plan.agreement
    together = agreement.sums
    in_turn = agreement.weights == "server" and agreement.order == "step"
    if job.objectives:
        _check_objectives(job, plan, together=together)
    sums = agreement.sums and not agreement.threads and plan.pipe.schedule != "pipedream"
    if job.precision in ("bf16-weights", "fp16") and not sums:
        why = (
            "weights have masters in one optimizer"
            if job.precision != "fp16"
            else "all ranks skip a step alike"
        )
        raise PlanError(
            f"precision={job.precision!r}: {why}, which plan {plan.name} has no place for.",
            fix="use a plan that sums gradients (ddp, zero1 to zero3, megatron, 1f1b), or precision='bf16'.",
        )
    if plan.memory.offload != "none" and not sums:
        raise PlanError(
            f"memory.offload keeps parts of one optimizer on the host, which plan {plan.name} has no place for.",
            fix="use a plan that sums gradients (single, ddp, zero1 to zero3, megatron, 1f1b), or drop it.",
        )
    if job.freeze and not (together or in_turn):
        raise PlanError(
            f"freeze names a step from which parameters are trained; under plan {plan.name} workers are at different "
            "steps, or mix weights between them, and have no such step in common.",
            fix=f"{_MARCHING}.",
        )
    if job.average is not None and not (together or in_turn):
        raise PlanError(
            f"average takes the weights after every step; under plan {plan.name} workers are at different steps, or "
            "mix weights between them, and have no such weights in common.",
            fix=f"{_MARCHING}.",
        )
    if job.average is not None and job.average.update_bn and not together:
        raise PlanError(
            f"average.update_bn: under plan {plan.name} servers hold the averages, and run no model.",
            fix="leave it out and call torch.optim.swa_utils.update_bn on a model with Result.averaged; or use ddp.",
        )
    if job.average is not None and job.average.evaluate and job.evaluate is not None and not together:
        raise PlanError(
            f"average.evaluate: under plan {plan.name} servers hold the averages, and workers measure.",
            fix="set Average(evaluate=False), so that averages are saved and the weights are measured; or use ddp.",
        )


def _check_objectives(job: Job, plan: Plan, *, together: bool) -> None:
    names = " and ".join(entry.name for entry in job.objectives)
    if not together:
        raise PlanError(
            f"the objectives {names} take turns by the step; under plan {plan.name} workers are at different steps, "
            "mix weights between them, or push to servers that know the gradients of one objective.",
            fix="use ddp, zero1, zero2, zero3 or megatron.",
        )
    if plan.mesh.size_of(PIPE) > 1:
        raise PlanError(
            f"a pipeline is cut between the ops of one step; the objectives {names} have other ops each, by which a "
            "parameter would be on one stage in one step and on another in the next.",
            fix="use ddp, zero1, zero2, zero3 or megatron.",
        )


def check_slow(slow: Mapping[int, float], plan: Plan, device: str) -> None:
    """Refuse stragglers that no rank can be."""
    for rank, factor in slow.items():
        if not 0 <= rank < plan.mesh.size:
            raise UsageError(
                f"slow={rank}={factor:g} names no worker; there are {plan.mesh.size}.",
                fix=f"name one from 0 to {plan.mesh.size - 1}.",
            )
        if not factor >= 1:
            raise UsageError(
                f"slow={rank}={factor:g} makes nothing slower.", fix="use a factor of 1 or more."
            )
    if slow and device != "cpu":
        raise UsageError("slow emulates stragglers on processors only.", fix="use --device cpu.")


def check_emulation(emulation: Emulation | None, plan: Plan, device: str, *, is_alone: bool = True) -> None:
    """Refuse a network that these ranks cannot have."""
    if emulation is None:
        return
    if device != "cpu" or not is_alone:
        raise UsageError(
            "a network is emulated between processors of one machine only.",
            fix="use --device cpu, and start it without an engine.",
        )
    if emulation.ranks != plan.ranks:
        raise UsageError(
            f"emulate has {emulation.hosts} hosts of {emulation.per_host} ranks; plan {plan.name} has {plan.ranks}.",
            fix=f"say hosts={plan.ranks}x1, or use {emulation.ranks} ranks.",
        )
    if "shared" in (plan.links.transport, plan.agreement.weights) or plan.agreement.threads:
        raise UsageError(
            "emulated hosts share no memory, which this plan needs.",
            fix="use another plan, or links.transport=auto.",
        )
