"""A quick prediction of plans whose workers do not sum gradients: a worker's step as a program without a model.

In: the costs of a model, a plan, a cluster. Out: a `Prediction`. A worker's share is a few pieces of the sketch's times
with its weights and gradients in as many buckets; pushes, pulls, exchanges and averages are written by the compiler's
own writers and run by the simulator that runs compiled programs, servers and all.
"""

from dataclasses import replace
from math import ceil

import torch

from plait.plan.mesh import Mesh
from plait.plan.plan import DATA, Plan
from plait.plan.single import single
from plait.program.cost.durations import Durations
from plait.program.cost.step_times import step_times
from plait.program.cost.update import UpdateWork
from plait.program.instructions import Instruction, Opaque, Update
from plait.program.layout import Layout
from plait.program.program import Bucket, Program, RankProgram
from plait.program.simulate.simulator import simulate
from plait.program.write.averaging import flats_of, with_averaging
from plait.program.write.push_pull import SERVERS, ServerSide, with_servers
from plait.program.write.writer import Writer
from plait.search.predict.prediction import MemoryUse, Prediction
from plait.search.predict.sketch import Sketcher

_PIECES = 8
"""Of a forward and of a backward, between which weights come and gradients leave. Real programs have a bucket every 8
MiB; with 8 pieces all but an eighth of what could be hidden is."""
_SETTLED = 30
"""Steps that count where who comes first decides what is next, after as many that do not."""
_MOST_SHARES = 2000
"""Shares of steps that are simulated at most for these: thousands of workers settle in a few steps."""


def relaxed_prediction(sketcher: Sketcher, plan: Plan, *, batch: int, limit_bytes: float) -> Prediction:
    """One step of `batch` samples, over all workers."""
    workers, share = plan.mesh.size, max(1, ceil(batch / plan.mesh.size))
    micro, memory = _fitting(sketcher, share, limit_bytes)
    steps = _round(sketcher, plan, micro, ceil(share / micro))
    agreement, program = plan.agreement, steps[-1]
    work = UpdateWork(
        optimizer="",
        shapes=(),
        parameter_bytes=int(sketcher.costs.parameters * sketcher.state.parameter),
        state_bytes=int(sketcher.costs.parameters * sketcher.state.optimizer),
    )
    own = replace(work, parameter_bytes=work.parameter_bytes // max(1, plan.sync.servers),
                  state_bytes=work.state_bytes // max(1, plan.sync.servers))  # fmt: skip
    durations = Durations(program, sketcher.cluster, {0: work, 1: own})
    times = sketcher.times(micro, "none")
    units = list(zip(times, (unit.repeat for unit in sketcher.costs.units), strict=True))
    seconds = {
        "forward": sum(t.forward_s * n for t, n in units) / _PIECES,
        "backward": sum(t.backward_s * n for t, n in units) / _PIECES,
    }

    def duration(rank: int, instruction: Instruction) -> float:
        if isinstance(instruction, Opaque):
            return seconds[instruction.kind]
        return durations.duration(rank, instruction)

    settled = len(steps) * ceil(max(2, min(_SETTLED, _MOST_SHARES // workers)) / len(steps))
    last = len(steps) if agreement.marches else settled
    trace = simulate(
        steps, duration, steps=2 * last, folded=True, latency=durations.latency, at_start=durations.at_start,
        own_part=durations.own_part, beside=durations.beside,
    )  # fmt: skip
    found = step_times(steps, trace, last)
    constants = sketcher.cluster.device.calibration
    served = agreement.weights == "server"
    return Prediction(
        plan=plan,
        cluster=sketcher.cluster,
        batch=share * workers,
        micro_batch=micro,
        step_s=found.step_s + constants.step_s,
        model_flops=sketcher.costs.flops.at(share) * workers,
        bubble=0.0,
        exposed_s=found.exposed_s,
        sent_bytes=found.sent_bytes,
        memory=replace(memory, optimizer=0.0) if served else memory,
        limit_bytes=limit_bytes,
        peak_flops=sketcher.cluster.device.rate(sketcher.costs.dtype),
    )


def _fitting(sketcher: Sketcher, share: int, limit_bytes: float) -> tuple[int, MemoryUse]:
    """The largest micro-batch that fits, of a share halved again and again; else single samples."""
    micro = share
    while True:
        use = sketcher.memory(single(1), micro_batch=micro, batch=share, limit_bytes=limit_bytes)
        if use.total <= limit_bytes or micro == 1:
            return micro, use
        micro = ceil(micro / 2)


def _round(sketcher: Sketcher, plan: Plan, micro: int, num_micro: int) -> list[Program]:
    """The programs of a worker's steps from one time that weights are mixed to the next."""
    agreement = plan.agreement
    size = int(sketcher.costs.parameters / _PIECES) + 1
    served = agreement.weights == "server"
    buckets = tuple(
        Bucket(
            parameters=(f"weights {k}",),
            shapes=((size,),),
            dtype=torch.float32,
            axis=SERVERS if served else None,
        )
        for k in range(_PIECES)
    )
    program = Program(
        plan=plan,
        micro_batches=(micro,) * num_micro,
        shares=((micro,),) * num_micro,
        classes=(_worker(buckets, num_micro, served=served),),
        members=(0,) * plan.mesh.size,
        layout=Layout(mesh=Mesh(axes=((DATA, 1),)), axes=(), parameters={}),
        gathered=(),
        notices=(),
        total_weight=None,
    )
    trained = {bucket.parameters[0]: (bucket.shapes[0], bucket.dtype) for bucket in buckets}
    flats = flats_of(plan, trained, {})
    if not flats:
        return [with_servers(program)]
    length = agreement.round or 1
    due = [agreement.due(agreement.warmup + step, step == length - 1) for step in range(length)]
    made = {fragments: with_servers(with_averaging(program, flats, fragments)) for fragments in set(due)}
    return [made[fragments] for fragments in due]


def _worker(buckets: tuple[Bucket, ...], num_micro: int, *, served: bool) -> RankProgram:
    writer = Writer()
    servers = ServerSide(buckets, writer) if served else None
    if servers is not None:
        servers.pull(range(_PIECES))
    for number in range(num_micro):
        for piece in range(_PIECES):
            if servers is not None:
                servers.wait([piece], number)
            writer.add(
                Opaque(name=f"forward {piece}", kind="forward", parameters=(), buffers=(), micro_batch=number)
            )
        for piece in reversed(range(_PIECES)):
            writer.add(
                Opaque(
                    name=f"backward {piece}", kind="backward", parameters=(), buffers=(), micro_batch=number
                )
            )
            if servers is not None and number == num_micro - 1:
                servers.push(piece, number)
    if servers is not None:
        servers.finish(late_weight=False)
    else:
        writer.add(Update(name="update"))
    return RankProgram(
        instructions=tuple(writer.instructions), buckets=buckets, segments={}, values={}, constants={}
    )
