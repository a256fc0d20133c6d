"""A schedule as a program without a model: for pictures and bubble rates.

In: the actions of each rank, and what an action and a message cost. Out: a `Program` of `Compute`, `Send`, `Recv` and
`Wait` that the simulator takes like any other, its durations, and the idle share of a trace.
"""

from collections.abc import Sequence

from plait.plan.mesh import Mesh
from plait.plan.plan import PIPE, Plan
from plait.program.instructions import Compute, Instruction, Kind, Recv, Send, Wait
from plait.program.layout import Layout
from plait.program.place.placement import AxisShares
from plait.program.program import Program, RankProgram
from plait.program.simulate.simulator import Duration
from plait.program.stage.schedules.base import Action, Costs
from plait.program.value import Value
from plait.trace.span import Trace


def program_of_schedule(name: str, actions: Sequence[Sequence[Action]]) -> Program:
    """What the ranks of a pipeline do under a schedule; each receives right before it needs what it receives."""
    mesh = Mesh(axes=((PIPE, len(actions)),))
    stages = 1 + max(action.stage for own in actions for action in own)
    micro_batches = 1 + max(action.micro_batch for own in actions for action in own)
    return Program(
        plan=Plan(name=name, mesh=mesh),
        layout=Layout(mesh=mesh, axes=(AxisShares(name=PIPE, units=(1,) * len(actions)),), parameters={}),
        micro_batches=(1,) * micro_batches,
        shares=((1,),) * micro_batches,
        classes=tuple(
            RankProgram(
                instructions=tuple(_rank(own, len(actions), stages)),
                buckets=(),
                segments={},
                values={},
                constants={},
            )
            for own in actions
        ),
        members=tuple(range(len(actions))),
        gathered=(),
        notices=(),
        total_weight=1.0,
    )


def durations(costs: Costs, *, message: float = 0.0) -> Duration:
    """How long actions and messages take."""
    taken = {
        "forward": costs.forward,
        "input": costs.input,
        "weight": costs.weight,
        "backward": costs.input + costs.weight,
    }

    def duration(rank: int, instruction: Instruction) -> float:
        return taken[instruction.segment] if isinstance(instruction, Compute) else message

    return duration


def bubble_rate(trace: Trace) -> float:
    """The idle share of the rank that takes longest from its first action to its last (Qi et al. 2023, section 4.2).

    Ranks start one after the other and end one after the other, so that the next step fills the two ends.
    """
    times: dict[int, tuple[float, float, float]] = {}
    for span in trace.spans:
        if span.kind in ("forward", "backward"):
            first, last, busy = times.get(span.rank, (span.start_s, span.end_s, 0.0))
            times[span.rank] = min(first, span.start_s), max(last, span.end_s), busy + span.duration_s
    first, last, busy = max(times.values(), key=lambda entry: entry[1] - entry[0])
    return 1 - busy / (last - first)


def _rank(own: Sequence[Action], ranks: int, stages: int) -> list[Instruction]:
    """Values: `3/x.1` enters stage 1 with micro-batch 3, `3/dx.1` is its gradient; what stays for later is `kept`."""
    found: list[Instruction] = []
    for action in own:
        stage, number = action.stage, action.micro_batch
        kind: Kind = "forward" if action.kind == "forward" else "backward"
        source, target = (stage - 1, stage + 1) if kind == "forward" else (stage + 1, stage - 1)
        value = "x" if kind == "forward" else "dx"
        travels = action.kind != "weight"
        enters = (
            (Value.node(f"{value}.{max(stage, source)}", number),) if travels and 0 <= source < stages else ()
        )
        leaves = (
            (Value.node(f"{value}.{max(stage, target)}", number),) if travels and 0 <= target < stages else ()
        )
        if enters and ranks > 1:
            message = f"{kind} {source}>{stage} micro-batch {number}"
            found += _receive(len(found), message, source % ranks, enters, action)
        kept = (Value.node(f"kept.{stage}", number),)
        later = (Value.node(f"kept for weights.{stage}", number),)
        reads, writes = {
            "forward": (enters, (*leaves, *kept)),
            "backward": ((*enters, *kept), leaves),
            "input": ((*enters, *kept), (*leaves, *later)),
            "weight": (later, ()),
        }[action.kind]
        found.append(
            Compute(
                id=len(found), name=f"{action.kind} {stage}", kind=kind, segment=action.kind, reads=reads,
                writes=writes, frees=reads, stage=stage, micro_batch=number,
            )
        )  # fmt: skip
        if leaves and ranks > 1:
            message = f"{kind} {stage}>{target} micro-batch {number}"
            found.append(
                Send(
                    id=len(found), name=f"send {message}", kind="communication", lane="communication", axis=PIPE,
                    to=target % ranks, message=message, reads=leaves, frees=leaves, stage=stage,
                    micro_batch=number,
                )
            )  # fmt: skip
    return found


def _receive(
    position: int, message: str, source: int, values: tuple[Value, ...], action: Action
) -> list[Instruction]:
    return [
        Recv(
            id=position, name=f"receive {message}", kind="communication", lane="communication", axis=PIPE,
            source=source, message=message, writes=values, stage=action.stage, micro_batch=action.micro_batch,
        ),
        Wait(
            id=position + 1, name=f"wait for {message}", kind="wait", of=position, reads=values, writes=values,
            stage=action.stage, micro_batch=action.micro_batch,
        ),
    ]  # fmt: skip
