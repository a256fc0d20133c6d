"""A schedule as a program without a model: for pictures and bubble rates.

In: the actions of each rank, and what an action and a message cost. Out: a `Program` of `Compute`, `Send`, `Recv` and
`Wait` that the simulator takes like any other, its durations, and the idle share of a trace.
"""

from collections.abc import Sequence

from plait.plan.mesh import Mesh
from plait.plan.plan import PIPE, Plan
from plait.program.instructions import Compute, Instruction, Recv, Send
from plait.program.layout import Layout
from plait.program.place.placement import AxisShares
from plait.program.program import Program, RankProgram
from plait.program.simulate.event_clock import Duration
from plait.program.stage.schedules.base import Action, Costs
from plait.program.stage.schedules.messages import Inbox, Message, direction_of, needs
from plait.program.value import Value
from plait.program.write.writer import Writer
from plait.trace.span import Trace


def program_of_schedule(name: str, actions: Sequence[Sequence[Action]]) -> Program:
    """What the ranks of a pipeline do under a schedule.

    Each makes room for a message right before it needs it, or earlier: in the order in which its sender sends.
    """
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
                instructions=tuple(_rank(actions, rank, stages)),
                buckets=(),
                segments={},
                values={},
                constants={},
            )
            for rank in range(len(actions))
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


def _rank(schedule: Sequence[Sequence[Action]], rank: int, stages: int) -> Sequence[Instruction]:
    """Values: `3/x.1` enters stage 1 with micro-batch 3, `3/dx.1` is its gradient; what stays for later is `kept`."""
    own, ranks, writer = schedule[rank], len(schedule), Writer()
    inbox = Inbox((m for action in own if (m := _arriving(action, stages)) is not None), schedule)
    posted: dict[Message, int] = {}
    for action in own:
        stage, number = action.stage, action.micro_batch
        arriving, leaving = _arriving(action, stages), _leaving(action, stages)
        enters = () if arriving is None else (_value(arriving),)
        leaves = () if leaving is None else (_value(leaving),)
        if arriving is not None and ranks > 1:
            for message in inbox.up_to(arriving):
                posted[message] = writer.add(
                    Recv(
                        name=f"receive {message}", axis=PIPE, source=message.source % ranks, message=str(message),
                        writes=(_value(message),), stage=message.to, micro_batch=message.micro_batch,
                    )
                )  # fmt: skip
            writer.wait(posted[arriving], arriving, number, stage)
        kept = (Value.node(f"kept.{stage}", number),)
        later = (Value.node(f"kept for weights.{stage}", number),)
        reads, writes = {
            "forward": (enters, (*leaves, *kept)),
            "backward": ((*enters, *kept), leaves),
            "input": ((*enters, *kept), (*leaves, *later)),
            "weight": (later, ()),
        }[action.kind]
        writer.add(
            Compute(
                name=f"{action.kind} {stage}", kind="forward" if action.kind == "forward" else "backward",
                segment=action.kind, reads=reads, writes=writes, frees=reads, stage=stage, micro_batch=number,
            )
        )  # fmt: skip
        if leaving is not None and ranks > 1:
            writer.add(
                Send(
                    name=f"send {leaving}", axis=PIPE, to=leaving.to % ranks, message=str(leaving), reads=leaves,
                    frees=leaves, stage=stage, micro_batch=number,
                )
            )  # fmt: skip
    return writer.instructions


def _arriving(action: Action, stages: int) -> Message | None:
    needed = needs(action, stages)
    return None if needed is None else Message(needed[0], needed[1], action.stage, action.micro_batch)


def _leaving(action: Action, stages: int) -> Message | None:
    direction = direction_of(action)
    to = action.stage + 1 if direction == "forward" else action.stage - 1
    if direction is None or not 0 <= to < stages:
        return None
    return Message(direction, action.stage, to, action.micro_batch)


def _value(message: Message) -> Value:
    name = "x" if message.direction == "forward" else "dx"
    return Value.node(f"{name}.{max(message.source, message.to)}", message.micro_batch)
