"""Time what is done to gradients so that less of them travels, and back.

In: the program of one rank. Out: seconds by `compress_key`. Nothing travels: what the others would have sent is what
this rank sends itself.
"""

from collections.abc import Callable
from statistics import median

import torch

from plait.plan.decisions import Sync
from plait.plan.mesh import Mesh
from plait.program.cost.op_key import compress_key
from plait.program.instructions import Compress, Decompress
from plait.program.program import RankProgram
from plait.run.interpret.compression import Compressor
from plait.run.link.links import NoLinks
from plait.run.measure.op_times import clock_of

_REPEATS = 4
"""Of each; the first makes what is kept from step to step and does not count."""


def time_compression(
    own: RankProgram, mesh: Mesh, sync: Sync, device: torch.device, busy: int, between: Callable[[], None]
) -> dict[str, float]:
    """Seconds by key; `between`: called before each round, by all ranks alike, so that all are at it at once."""
    compressor, clock = Compressor(NoLinks()), clock_of(device)
    found: dict[str, list[float]] = {}
    sums: dict[int, list[torch.Tensor]] = {}
    wanted = [i for i in own.instructions if isinstance(i, Compress | Decompress)]
    generator = torch.Generator().manual_seed(0)
    flats = {
        i.bucket: torch.randn(own.buckets[i.bucket].num_elements, generator=generator).to(
            device, own.buckets[i.bucket].dtype
        )
        for i in wanted
    }
    for _ in range(0 if sync.compress == "none" else _REPEATS):
        between()
        for instruction in wanted:
            bucket, flat = own.buckets[instruction.bucket], flats[instruction.bucket]
            assert bucket.axis is not None
            clock.begin()
            if isinstance(instruction, Compress):
                before = sums[instruction.bucket][-1] if instruction.part else None
                given = (bucket, flat, sync, instruction.part, before)
                message = clock.time(compressor.compress, given, {})
                gathered = message.repeat(mesh.size_of(bucket.axis)) if sync.compress == "topk" else message
                sums.setdefault(instruction.bucket, []).append(gathered)
            else:
                clock.time(compressor.decompress, (bucket, flat, sync, sums.pop(instruction.bucket)), {})
            found.setdefault(compress_key(instruction, bucket, sync, busy), []).append(clock.end()[0][0])
    return {key: median(times[len(times) // _REPEATS :]) for key, times in found.items()}
