"""How fast a job runs under a plan on a cluster, and whether it fits, without running it.

In: a job, a plan, a cluster. Out: a `Predicted`. Without a cluster it is this machine: as `measure` found it, else
measured shortly, and the parts of the step are timed on it. So they are for a cluster that `measure` found on machines
like this one, such as the hosts that it is one of.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.api.inputs.given import given_job
from plait.api.machine import remember, this_machine
from plait.cluster.cluster import Cluster
from plait.cluster.emulated import emulated
from plait.cluster.parse import THIS, parse_cluster
from plait.errors import UsageError
from plait.job.generators import kept_generators
from plait.job.job import Job
from plait.options import Changes, Listener, Trial
from plait.plan.named import resolve
from plait.plan.plan import Plan
from plait.run.measure.machine import processor_name
from plait.run.measure.predict import Predicted, predict_job
from plait.run.prepare.fits import parse_memory
from plait.run.prepare.rules import check_emulation


@kept_generators()
def predict(
    job: Job | str,
    plan: str | Path | Plan | None = None,
    ranks: int | None = None,
    *,
    changes: Changes = Changes(),
    cluster: str | Cluster | None = None,
    memory: str | None = None,
    device: str = "cpu",
    emulate: str | None = None,
    listener: Listener | None = None,
) -> Predicted:
    """Compile a step of the job, simulate it, and tell its time, waiting and memory.

    A plan that says no number of ranks is predicted on all devices of a `cluster` that is given. `emulate` is a network
    between hosts that are this machine, as a run takes it: "bandwidth=1Gbit,latency=1ms,hosts=2x2".
    """

    def tell(stage: str) -> None:
        if listener is not None:
            listener({"stage": stage})

    limit = parse_memory(memory)
    network = Trial(emulate=emulate).emulation
    known = cluster if isinstance(cluster, Cluster) else None
    if isinstance(cluster, str) and cluster != THIS:
        known = parse_cluster(cluster)
    given, of_plan = given_job(job, changes)
    if network is not None and known is not None:
        raise UsageError(
            f"a network is emulated on this machine, not on {known.name}.", fix="drop cluster or emulate."
        )
    if network is not None and ranks is None and not changes.mesh:
        ranks = network.ranks
    chosen = _on(known, plan, ranks, changes.mesh, of_plan)
    check_emulation(network, chosen, device)
    machine = devices = known if known is not None else this_machine(device, tell)
    if network is not None:
        devices = emulated(machine, network)
    if known is None and cluster is not None:
        chosen = _on(devices, plan, ranks, changes.mesh, of_plan)
    is_here = known is None or (device == "cpu" and known.device.name == processor_name())
    found = predict_job(
        given, chosen, devices, time_on=device if is_here else None, limit_bytes=limit, tell=tell
    )
    if known is None:
        remember(replace(machine, device=replace(machine.device, timed=found.cluster.device.timed)))
    return found


def _on(
    cluster: Cluster | None,
    plan: str | Path | Plan | None,
    ranks: int | None,
    mesh: Mapping[str, int] | None,
    settings: Mapping[str, Any] | None,
) -> Plan:
    """The plan, on the whole cluster where nobody says otherwise."""
    open_size = ranks is None and not mesh and not isinstance(plan, Plan) and plan != "single"
    if cluster is not None and open_size and Path(str(plan or "")).suffix not in (".yaml", ".yml"):
        ranks = cluster.size
    return resolve(plan, ranks, settings, mesh)
