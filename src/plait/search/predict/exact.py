"""The exact prediction of a plan: its compiled program, on the clocks of a cluster.

In: a compiled program, the job's optimizer, a cluster. Out: a `Prediction`. Slower than a sketch, since the step must
have been compiled for every rank; nothing is folded but ranks that do the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait.cluster.calibration import Calibration
from plait.cluster.cluster import Cluster
from plait.job.updates.optimizer_state import Builder
from plait.program.cost.durations import Durations
from plait.program.cost.memory import step_memory
from plait.program.cost.step_times import step_times
from plait.program.cost.update import UpdateWork, update_work
from plait.program.hops.price import Network, hop_travel
from plait.program.program import Program
from plait.program.simulate.hop_spans import with_hops
from plait.program.simulate.simulator import simulate
from plait.search.predict.prediction import MemoryUse, Prediction
from plait.trace.span import Span, Trace

_STEPS = 3
"""Simulated: the last one starts while ranks still end the one before."""
_BETWEEN = 960_000_000
"""Ids of spans that are no instruction's: what the host does before a step."""
_SETTLED = 30
"""Steps that count where who comes first decides what is next, after as many that do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exact:
    """A prediction and the timeline behind it."""

    prediction: Prediction
    trace: Trace
    """Of the last simulated step's kind: one rank for all that do the same. Its steps last what is predicted."""


def exact_prediction(
    program: Program | Sequence[Program],
    cluster: Cluster,
    build_optimizer: Builder,
    *,
    model_flops: float,
    buffer_bytes: int = 0,
    dtype: str = "float32",
    limit_bytes: float | None = None,
) -> Exact:
    """Simulate the program, or those of a round's steps, on the cluster.

    `model_flops` are those of the batch, without what is computed again; `dtype` is that of the matrix products.
    """
    steps = [program] if isinstance(program, Program) else program
    program, agreement = steps[-1], steps[-1].plan.agreement
    first = {entry: program.members.index(entry) for entry in range(len(program.classes))}
    updates = {entry: update_work(program, rank, build_optimizer) for entry, rank in first.items()}
    network = Network.of(cluster, program.plan.mesh.size)
    durations = Durations(
        program,
        cluster,
        updates,
        lambda collective, group: hop_travel(program.plan, collective, group, network),
    )
    last = len(steps) if agreement.marches else len(steps) * -(-_SETTLED // len(steps))
    before = (_STEPS - 1) * len(steps) if agreement.marches else last
    trace = simulate(
        steps,
        durations.duration,
        steps=before + last,
        folded=True,
        latency=durations.latency,
        at_start=durations.at_start,
        own_part=durations.own_part,
        beside=durations.beside,
        duplex=cluster.device.duplex,
        processors=cluster.processors if program.plan.ranks == cluster.size else None,
    )
    times = step_times(steps, trace, last)
    constants = cluster.device.calibration
    uses = [
        memory_use(program, rank, updates[entry], buffer_bytes=buffer_bytes, at_once=constants.host_s > 0)
        for entry, rank in first.items()
    ]
    prediction = Prediction(
        plan=program.plan,
        cluster=cluster,
        batch=sum(program.micro_batches) * (program.plan.mesh.size if agreement.alone else 1),
        micro_batch=max(max(units) for units in program.shares),
        step_s=times.step_s + constants.step_s,
        model_flops=model_flops,
        bubble=times.bubble,
        exposed_s=times.exposed_s,
        sent_bytes=times.sent_bytes,
        memory=_with_overhead(max(uses, key=lambda use: use.total), constants),
        limit_bytes=cluster.device.memory_bytes if limit_bytes is None else limit_bytes,
        peak_flops=cluster.device.rate(dtype),
    )
    trace = _with_host_time(trace, constants.step_s, program.plan.mesh.size)
    return Exact(prediction=prediction, trace=with_hops(trace, program, network))


def memory_use(
    program: Program, rank: int, update: UpdateWork, *, buffer_bytes: int = 0, at_once: bool = True
) -> MemoryUse:
    """What the tensors of a rank need: the most of a step, or of its update, whichever is more.

    `at_once`: the optimizer updates all tensors at once, as it does on a GPU, and not one after the other.
    """
    step = step_memory(program, rank)
    in_step = step.flat_gradients + step.travelling + step.gathered + step.together
    extra = update.extra_bytes(at_once=at_once)
    if step.last_part is not None:  # beside what is computed meanwhile
        part = min(extra, step.last_part)
        gradients, activations = step.flat_gradients, step.together
        buffers = buffer_bytes + step.travelling + step.gathered + step.fetched + part
    elif in_step >= step.gradients + extra:
        gradients, activations = step.flat_gradients, step.together
        buffers = buffer_bytes + step.travelling + step.gathered
    else:
        gradients, activations, buffers = step.gradients, 0, buffer_bytes + extra
    return MemoryUse(
        parameters=step.parameters,
        gradients=gradients,
        optimizer=update.state_bytes - step.state_away,
        activations=activations,
        buffers=buffers,
        overhead=0.0,
    )


def _with_overhead(use: MemoryUse, constants: Calibration) -> MemoryUse:
    pieces = constants.fragmentation * (use.activations + use.buffers)
    return replace(use, overhead=constants.reserve_bytes + pieces)


def _with_host_time(trace: Trace, seconds: float, workers: int) -> Trace:
    """The trace with the time of each step in which no device works, before what is simulated of it.

    All of a step is later by the same time on all ranks, so that nothing comes before what it waits for.
    """
    if not seconds:
        return trace
    later = [
        replace(s, start_s=s.start_s + (s.step + 1) * seconds, end_s=s.end_s + (s.step + 1) * seconds)
        for s in trace.spans
    ]
    firsts: dict[tuple[int, int], float] = {}
    for span in later:
        if span.lane == "compute" and span.rank < workers:
            key = (span.rank, span.step)
            firsts[key] = min(span.start_s, firsts.get(key, span.start_s))
    for (rank, step), start_s in firsts.items():
        later.append(
            Span(
                rank=rank,
                step=step,
                instruction=_BETWEEN,
                kind="host",
                name="between steps",
                lane="compute",
                start_s=start_s - seconds,
                end_s=start_s,
            )
        )
    return replace(trace, spans=tuple(later))
