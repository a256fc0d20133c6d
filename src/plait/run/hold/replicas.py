"""Whether ranks that hold the same weights still do, bit for bit: a digest of each parameter, compared.

In: a rank's parameters and how they are held. Out: nothing, or an error on every rank that names the parameter and the
ranks that differ. A digest is the sum of a tensor's bits as integers, modulo their size: any change of one word is
found, at the speed of reading the memory once. What one rank alone holds has no digest to be compared with.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.errors import SpoiledError
from plait.plan.plan import DATA, PIPE
from plait.program.layout import Layout
from plait.torch_private.wrappers import is_wrapper, parts_of

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.int8))


def compare_replicas(
    parameters: Mapping[str, Tensor], names: Sequence[str], layout: Layout | None, step: int
) -> None:
    """Compare with all ranks of the default group, who must call it too; `names`: all parameters, in one order."""
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    own = torch.stack([digest(parameters[name]) if name in parameters else nothing for name in names])
    own = own if dist.get_backend() == "nccl" else own.cpu()
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    table = torch.stack(found).cpu()
    suspects = [names[index] for index in (table != table[0]).any(0).nonzero().flatten().tolist()]
    by_name = {name: table[:, names.index(name)].tolist() for name in suspects}
    for name, digests in by_name.items():
        for ranks in replicas_of(layout, name, len(found), device.type):
            wrong, right = outvoted({rank: digests[rank] for rank in ranks})
            if wrong:
                raise _spoiled(name, wrong, right, step)


def digest(tensor: Tensor) -> Tensor:
    """The sum of the bits of a tensor, on its device; of all those that it is made of."""
    if is_wrapper(tensor):
        return torch.stack([digest(part) for part in parts_of(tensor.detach())]).sum()
    flat = tensor.detach().contiguous().view(-1)
    size, start = flat.numel() * flat.element_size(), int(flat.storage_offset()) * flat.element_size()
    word = next(kind for width, kind in _WORDS if size % width == 0 and start % width == 0)
    return flat.view(word).sum(dtype=word).to(torch.int64)


def replicas_of(layout: Layout | None, name: str, ranks: int, device: str) -> list[list[int]]:
    """The ranks that hold the same shard of a parameter and update it alike, group by group.

    On a GPU only along `data`, where all use one summed gradient: elsewhere each computes its own, and kernels that add
    in any order may round differently.
    """
    if layout is None:
        return [list(range(ranks))]
    groups: dict[tuple[int, ...], list[int]] = {}
    mesh, cut = layout.mesh, {*layout.cut_axes(name), PIPE}
    for rank in range(mesh.size):
        if layout.is_held(name, rank):
            apart = [axis for axis, _ in mesh.axes if axis in cut or (device != "cpu" and axis != DATA)]
            groups.setdefault(tuple(mesh.coordinate(rank, axis) for axis in apart), []).append(rank)
    return [members for members in groups.values() if len(members) > 1]


def outvoted(digests: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """(ranks that are wrong, ranks that are right); where no majority tells, all are suspected and none is right."""
    counts = Counter(digests.values()).most_common()
    if len(counts) == 1:
        return [], list(digests)
    value, count = counts[0]
    if 2 * count <= len(digests):
        return list(digests), []
    return [r for r, d in digests.items() if d != value], [r for r, d in digests.items() if d == value]


def _spoiled(name: str, wrong: Sequence[int], right: Sequence[int], step: int) -> SpoiledError:
    listed = ", ".join(map(str, wrong))
    if right:
        told = f"rank{'s' if len(wrong) > 1 else ''} {listed} {'have' if len(wrong) > 1 else 'has'} other bits than "
        told += f"rank{'s' if len(right) > 1 else ''} {', '.join(map(str, right))}"
    else:
        told = f"ranks {listed} have different bits, and too few hold it to say whose are wrong"
    return SpoiledError(
        f"after step {step + 1}, {told} in {name!r}: memory or a device failed, or an operation is not deterministic.",
        step=step,
        cause="weights",
        fix="test the memory of the host; --compare-every 0 looks only before a checkpoint.",
    )
