"""From a job and a plan to an exact prediction on a cluster; on this machine, its parts are timed first.

In: a job, a plan, a cluster, and whether its ops may be timed here. Out: the prediction, its timeline, and the cluster
with the times that were added. The step is compiled; nothing is trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from plait.cluster.cluster import Cluster, Link
from plait.errors import PlanError
from plait.graph.cost import node_flops, value_bytes
from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.job.data.open import open_data
from plait.job.job import Job
from plait.options import Emulation
from plait.plan.plan import Plan
from plait.program.hops.price import Network, choices_of
from plait.run.measure.program_times import time_program
from plait.run.prepare.programs import Programs
from plait.search.choose.candidates import cheapest_offload
from plait.search.predict.exact import Exact, exact_prediction
from plait.search.predict.prediction import Prediction
from plait.trace.span import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A prediction, and what it rests on."""

    exact: Exact
    """The prediction, and its timeline."""
    cluster: Cluster
    """The cluster with everything that was timed."""
    notices: tuple[str, ...]
    """How open choices of the plan were made, and what else a person should know."""

    @property
    def prediction(self) -> Prediction:
        """Times, memory, money: what a step costs."""
        return self.exact.prediction

    @property
    def trace(self) -> Trace:
        """The predicted timeline, of the same type as a measured one."""
        return self.exact.trace


def predict_job(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    *,
    time_on: str | None = None,
    limit_bytes: float | None = None,
    tell: Callable[[str], None] = lambda stage: None,
    captures: Captures | None = None,
) -> Predicted:
    """Compile the job's step and simulate it; `time_on` names the device on which its parts are timed first."""
    _check_room(plan, cluster)
    if plan.memory.offload == "auto":
        captures = captures or Captures(job, device_type=torch.device(time_on or "cpu").type)
        return cheapest_offload(
            plan,
            lambda trial: predict_job(
                job, trial, cluster, time_on=time_on, limit_bytes=limit_bytes, tell=tell, captures=captures
            ),
            lambda found: found.prediction.fits,
            lambda found: found.prediction.step_s,
        )
    tell("compiling a step")
    source = captures.source if captures is not None else open_data(job.data, job.collate)
    device = torch.device(time_on or "cpu")
    programs = Programs(job, source, plan, device, torch.float32, captures)
    steps = programs.round()
    program = steps[-1]
    if programs.capture_error is not None:
        raise programs.capture_error
    if time_on is not None:
        tell("timing the parts of a step")
        busy = min(plan.mesh.size, cluster.devices_per_machine)
        times = time_program(programs, program, busy, time_on, cluster.device.timed, _network(cluster, plan))
        known = dict(cluster.device.timed) | dict(times.seconds)
        calibration = cluster.device.calibration
        if times.host_s:
            calibration = replace(calibration, host_s=times.host_s)
        cluster = replace(cluster, device=replace(cluster.device, timed=known, calibration=calibration))
    tell("simulating")
    graphs = [programs.captures.of_size(sum(units)) for units in programs.full_shares()]
    exact = exact_prediction(
        steps, cluster, job.build_optimizer, model_flops=float(sum(_flops(graph) for graph in graphs)),
        buffer_bytes=_buffer_bytes(graphs[0]), dtype="float32" if job.precision == "fp32" else "bfloat16",
        limit_bytes=limit_bytes,
    )  # fmt: skip
    network = Network.of(cluster, plan.mesh.size)
    notices = [*programs.choices, *program.notices, *choices_of(program, network)]
    if plan.ranks > plan.mesh.size:
        notices.append("servers are priced as devices like the workers'.")
    return Predicted(exact=exact, cluster=cluster, notices=tuple(notices))


def _check_room(plan: Plan, cluster: Cluster) -> None:
    if plan.mesh.size > cluster.size:
        raise PlanError(
            f"plan {plan.name} is for {plan.mesh.size} ranks; the cluster {cluster.name} has {cluster.size} devices.",
            fix="use fewer ranks, or a larger cluster.",
        )
    if plan.agreement.threads and plan.mesh.size > cluster.devices_per_machine:
        raise PlanError(
            f"plan {plan.name} has {plan.mesh.size} ranks in one process; a host of {cluster.name} has "
            f"{cluster.devices_per_machine} devices.",
            fix="use fewer ranks, or the plan ddp.",
        )


def _network(cluster: Cluster, plan: Plan) -> tuple[Emulation, Link] | None:
    """The network of a cluster that is one machine, where the plan's ranks, all of them workers, fill it."""
    if not cluster.emulated or cluster.hosts == 1 or not plan.ranks == plan.mesh.size == cluster.size:
        return None
    between = cluster.between
    emulation = Emulation(
        bandwidth=between.bandwidth, latency_s=between.latency_s, hosts=cluster.hosts,
        per_host=cluster.devices_per_host,
    )  # fmt: skip
    return emulation, between


def _flops(graph: Graph) -> int:
    return sum(node_flops(node) for node in graph.graph.nodes if node.op == "call_function")


def _buffer_bytes(graph: Graph) -> int:
    nodes = graph.nodes()
    return sum(value_bytes(nodes[entry.node].meta["val"]) for entry in graph.inputs_of("buffer"))
