"""When values may be dropped.

In: the instructions of a step. Out: the same, each naming the values that nobody reads after it.
"""

from dataclasses import replace

from plait.program.instructions import Collective, Instruction

PERSISTENT = ("parameter:", "buffer:", "constant:", "bucket:", "offset:", "chunk:", "shard:", "average:")
"""Values that outlive the step."""


def with_frees(instructions: list[Instruction], *, fetched: bool = False) -> list[Instruction]:
    """Name in each instruction the values that nobody reads afterwards, or not before they are made again.

    `fetched`: parameters do not outlive the step, nor the stretch for which they were gathered.
    """
    kept = {"total", "weight"}
    persistent = tuple(prefix for prefix in PERSISTENT if not (fetched and prefix == "parameter:"))
    last: dict[str, int] = {}
    frees: dict[int, list[str]] = {}
    for instruction in instructions:
        if isinstance(instruction, Collective) and instruction.op == "all_gather":
            for name in instruction.writes:
                if name in last and not name.startswith(persistent):
                    frees.setdefault(last[name], []).append(name)
        for name in (*instruction.reads, *instruction.writes):
            last[name] = instruction.id
    for name, index in last.items():
        if not name.startswith(persistent) and name not in kept and "/offset:" not in name:
            frees.setdefault(index, []).append(name)
    return [replace(instruction, frees=tuple(frees.get(instruction.id, ()))) for instruction in instructions]
