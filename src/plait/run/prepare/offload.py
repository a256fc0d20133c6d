"""What `memory.offload=auto` is for a job: as much on the host as it must be, and what costs least of that.

In: a plan, and a way to prepare one with another setting. Out: the programs of the cheapest that fits; or the error of
the one with the most on the host. Costs are those of the compiled steps, on the preset of this device; where there is
none, what moves least costs least.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from plait.cluster.cluster import Cluster
from plait.cluster.presets import preset, preset_called
from plait.errors import MisfitError
from plait.options import Listener
from plait.plan.plan import Plan
from plait.run.prepare.programs import Programs
from plait.search.choose.candidates import cheapest_offload
from plait.search.predict.exact import exact_prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A setting that was tried."""

    programs: Programs | None
    error: MisfitError | None
    told: list[dict[str, object]]
    """What was said meanwhile."""


def with_cheapest_offload(
    plan: Plan, device: torch.device, tell: Listener, prepare: Callable[[Plan, Listener], Programs]
) -> Programs:
    """Prepare the plan with what it must keep on the host; raises where all of it is not enough."""

    def tried(trial: Plan) -> _Trial:
        told: list[dict[str, object]] = []
        try:
            return _Trial(programs=prepare(trial, told.append), error=None, told=told)
        except MisfitError as error:
            return _Trial(programs=None, error=error, told=told)

    def cost(trial: _Trial) -> float:
        assert trial.programs is not None
        return _step_s(trial.programs, _cluster(plan, device))

    found = cheapest_offload(plan, tried, lambda trial: trial.error is None, cost)
    if found.error is not None:
        raise found.error
    assert found.programs is not None
    for event in found.told:
        tell(event)
    return found.programs


def _step_s(programs: Programs, cluster: Cluster) -> float:
    return sum(
        exact_prediction(
            part.full_step(), cluster, part.job.build_optimizer, model_flops=0.0
        ).prediction.step_s
        for part in programs.parts
    )


def _cluster(plan: Plan, device: torch.device) -> Cluster:
    known = preset_called(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    cluster = (known or preset("H100")).cluster("this device", 1, plan.ranks)
    if device.type == "cuda":
        return cluster
    return replace(cluster, device=replace(cluster.device, host_bandwidth=0.0))
