"""What a rank does, one instruction at a time: every interpreter (worker, serial, simulator) executes these."""

from plait.program.instructions.base import Instruction, Lane, TimeKind
from plait.program.instructions.communicate import Collective, Combine, Compress, Decompress, Recv, Send, Wait
from plait.program.instructions.compute import (
    Accumulate,
    Commit,
    Compute,
    Copy,
    DrawnAt,
    Finish,
    Join,
    Keep,
    Load,
    Opaque,
    SquareSum,
    Stash,
    Tally,
    Tangent,
    Update,
)
from plait.program.instructions.relaxed import (
    Anchor,
    Exchange,
    Flatten,
    Handler,
    Leave,
    Lookahead,
    Mix,
    Momentum,
    Outcome,
    Pull,
    Push,
    PushBuffers,
    Serve,
)

__all__ = [
    "Accumulate",
    "Anchor",
    "Collective",
    "Combine",
    "Commit",
    "Compress",
    "Compute",
    "Copy",
    "Decompress",
    "DrawnAt",
    "Exchange",
    "Finish",
    "Flatten",
    "Handler",
    "Instruction",
    "Join",
    "Keep",
    "Lane",
    "Leave",
    "Load",
    "Lookahead",
    "Mix",
    "Momentum",
    "Opaque",
    "Outcome",
    "Pull",
    "Push",
    "PushBuffers",
    "Recv",
    "Send",
    "Serve",
    "SquareSum",
    "Stash",
    "Tally",
    "Tangent",
    "TimeKind",
    "Update",
    "Wait",
    "is_start",
]


def is_start(instruction: Instruction) -> bool:
    """Whether its result may be used after a `Wait` only."""
    if isinstance(instruction, Copy):
        return instruction.way == "in"
    if isinstance(instruction, Update):
        return instruction.lane == "host"
    return isinstance(instruction, Collective | Recv | Pull | Exchange)
