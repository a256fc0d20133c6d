"""When values may be dropped.

In: the instructions of a step. Out: the same, each naming the values that nobody reads after it.
"""

from dataclasses import replace

from plait.program.instructions import Collective, Instruction
from plait.program.value import TOTAL, WEIGHT, Value

PERSISTENT = frozenset({"parameter", "buffer", "bucket", "offset", "chunk", "shard", "average", "block"})
"""Kinds of values that outlive the step."""
RESULTS = (TOTAL, WEIGHT)
"""What is read after it."""


def with_frees(instructions: list[Instruction], *, fetched: bool = False) -> list[Instruction]:
    """Name in each instruction the values that nobody reads afterwards, or not before they are made again.

    `fetched`: parameters do not outlive the step, nor the stretch for which they were gathered.
    """
    persistent = PERSISTENT - {"parameter"} if fetched else PERSISTENT
    last: dict[Value, int] = {}
    frees: dict[int, list[Value]] = {}
    for instruction in instructions:
        if isinstance(instruction, Collective) and instruction.op == "all_gather":
            for value in instruction.writes:
                if value in last and value.kind not in persistent:
                    frees.setdefault(last[value], []).append(value)
        for value in (*instruction.reads, *instruction.writes):
            last[value] = instruction.id
    for value, index in last.items():
        if value.kind not in persistent and value not in RESULTS:
            frees.setdefault(index, []).append(value)
    return [replace(instruction, frees=tuple(frees.get(instruction.id, ()))) for instruction in instructions]
