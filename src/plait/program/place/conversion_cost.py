"""What it costs to turn one placement into another, by the bytes that a rank sends: those of ring algorithms.

    P -> R   all-reduce       2 (N-1)/N of the tensor       S -> R, S -> S'   all-gather   (N-1)/N
    P -> S   reduce-scatter     (N-1)/N                     R -> anything     none

In: two placements. Out: bytes for each byte of the tensor. Propagation, patterns and the solver all count by it.
"""

from math import inf

from plait.program.place.placement import Partial, Placement, Replicate

PER_SHARD = 1e-6
"""For each byte: cutting a shard out of a tensor sends nothing, but of two ways that send the same, the other one wins.
Small beside 1/N for any number of ranks, so that it decides nothing else."""


def conversion_bytes(have: Placement, want: Placement, num_ranks: int | None = None) -> float:
    """Bytes that a rank of so many sends (None: of very many); infinite where it cannot be done."""
    if have == want or num_ranks == 1 or isinstance(have, Replicate):
        return 0.0
    if isinstance(want, Partial):
        return inf
    part = 1.0 if num_ranks is None else (num_ranks - 1) / num_ranks
    return 2 * part if isinstance(have, Partial) and isinstance(want, Replicate) else part


def conversion_cost(have: Placement, want: Placement, num_ranks: int | None = None) -> float:
    """The same with what cutting a shard counts: what a choice between ways goes by."""
    if have == want:
        return 0.0
    cut = PER_SHARD if isinstance(have, Replicate) or not isinstance(want, Replicate) else 0.0
    return conversion_bytes(have, want, num_ranks) + cut
