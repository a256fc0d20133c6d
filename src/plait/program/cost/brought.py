"""What a rank brings to a collective.

In: a program, an instruction of one of its ranks. Out: the shape and the dtype of the tensor.
"""

import torch

from plait.program.instructions import Collective
from plait.program.program import Program, RankProgram


def brought(
    program: Program, own: RankProgram, collective: Collective
) -> tuple[tuple[int, ...], torch.dtype]:
    """The rank's tensor; where nothing is known of it, a number."""
    source = collective.source
    if source is None:
        return (), torch.float32
    if source.kind == "bucket":
        bucket = own.buckets[source.number]
        return (bucket.num_elements,), bucket.dtype
    if source.kind == "chunk":
        group = program.layout.groups[source.number]
        return (group.chunk_elements,), group.dtype
    if source in own.values:
        return own.values[source].shape, own.values[source].dtype
    return (), torch.float32
