"""How much of a device's memory instructions pass over that only move or add numbers.

In: an instruction of a rank's program. Out: bytes that it reads and writes.
"""

from collections.abc import Set

from plait.program.instructions import (
    Accumulate,
    Compress,
    Compute,
    Decompress,
    Finish,
    Flatten,
    Instruction,
    Join,
    Keep,
    Lookahead,
    Mix,
    Momentum,
    Serve,
    SquareSum,
    Stash,
)
from plait.program.program import RankProgram
from plait.program.value import Value


def memory_bytes(own: RankProgram, instruction: Instruction, filled: Set[Value]) -> float:
    """Bytes that an instruction other than a segment reads and writes; `filled`: what needs no copy to a bucket."""
    if isinstance(instruction, Accumulate):
        bucket = own.buckets[instruction.bucket]
        if not instruction.fresh:
            return 3.0 * bucket.num_bytes
        if bucket.axis is None and not bucket.tied:
            return 0.0
        copied = [own.values[n].num_bytes for n in instruction.reads if n in own.values and n not in filled]
        return 2.0 * sum(copied)
    if isinstance(instruction, Compress | Decompress):
        return 3.0 * own.buckets[instruction.bucket].num_bytes
    if isinstance(instruction, Keep | Join):
        bucket = own.buckets[instruction.bucket]
        parts = 1 if bucket.group is None else bucket.group.chunks
        return 3.0 * bucket.num_bytes / parts
    if isinstance(instruction, SquareSum | Finish):
        passes = 1 if isinstance(instruction, SquareSum) else 0
        passes += 3 if isinstance(instruction, Finish) and (
            instruction.clip or instruction.late_weight
        ) else 0  # fmt: skip
        return float(passes * sum(bucket.num_bytes for bucket in own.buckets))
    if isinstance(instruction, Serve):
        return 3.0 * sum(flat.num_bytes for flat in own.averages)
    if isinstance(instruction, Flatten | Lookahead | Momentum | Mix):
        flat = own.averages[instruction.flat]
        return (2.0 if isinstance(instruction, Flatten) else 3.0) * flat.num_bytes
    if isinstance(instruction, Stash):
        return 2.0 * sum(own.values[name].num_bytes for name in instruction.reads if name in own.values)
    return 0.0


def filled_in_place(own: RankProgram) -> frozenset[Value]:
    """Gradients that matrix products write straight into a bucket."""
    found: set[Value] = set()
    for instruction in own.instructions:
        if isinstance(instruction, Compute):
            segment = own.segments[instruction.segment]
            found.update(instruction.writes[position] for position in segment.fillable)
    return frozenset(found)
