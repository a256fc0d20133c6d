"""When values may be dropped.

In: the instructions of a step. Out: the same, each naming the values that nobody reads after it.
"""

from collections.abc import Sequence
from dataclasses import replace

from plait.program.instructions import Collective, Copy, Instruction
from plait.program.value import TOTAL, WEIGHT, Value

PERSISTENT = frozenset(
    {"parameter", "buffer", "bucket", "offset", "chunk", "shard", "average", "block", "stored"}
)
"""Kinds of values that outlive the step."""
RESULTS = (TOTAL, WEIGHT)
"""What is read after it."""


def with_frees(instructions: Sequence[Instruction], *, fetched: bool = False) -> list[Instruction]:
    """Name in each instruction the values that nobody reads afterwards, or not before they are made again.

    `fetched`: parameters do not outlive the step, nor the stretch for which they were gathered; so does nothing that
    lies on the host in between.
    """
    persistent = PERSISTENT - {"parameter"} if fetched else PERSISTENT
    gone = {v for i in instructions if isinstance(i, Copy) and i.way == "in" for v in i.writes}
    last: dict[Value, int] = {}
    frees: dict[int, list[Value]] = {}
    for instruction in instructions:
        gathers = isinstance(instruction, Collective) and instruction.op == "all_gather"
        if gathers or (isinstance(instruction, Copy) and instruction.way == "in"):
            for value in instruction.writes:
                if value in last and (value.kind not in persistent or value in gone):
                    frees.setdefault(last[value], []).append(value)
        for value in (*instruction.reads, *instruction.writes):
            last[value] = instruction.id
    for value, index in last.items():
        if (value.kind not in persistent or value in gone) and value not in RESULTS:
            frees.setdefault(index, []).append(value)
    return [replace(instruction, frees=tuple(frees.get(instruction.id, ()))) for instruction in instructions]
