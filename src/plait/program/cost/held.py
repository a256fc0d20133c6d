"""For how long a rank computes while its processor also has work with what is under way.

In: the instructions of a rank, seconds of their work. Out: seconds by collective. Both then have half of the processor.
"""

from collections.abc import Callable, Sequence

from plait.program.instructions import Collective, Compute, Instruction, Wait


def held_up(
    instructions: Sequence[Instruction],
    work: Callable[[Collective], float],
    compute: Callable[[Compute], float],
) -> dict[int, float]:
    """By collective: for how long of its work the rank computes as well, one collective after the other."""
    found: dict[int, float] = {}
    under_way: dict[int, float] = {}
    for instruction in instructions:
        if isinstance(instruction, Collective):
            under_way[instruction.id] = work(instruction)
        elif isinstance(instruction, Wait):
            under_way.pop(instruction.of, None)
        elif isinstance(instruction, Compute) and any(under_way.values()):
            left_s = compute(instruction)
            for number, work_s in under_way.items():
                shared_s = min(left_s, work_s)
                under_way[number] -= shared_s
                found[number] = found.get(number, 0.0) + shared_s
                left_s -= shared_s
    return found
