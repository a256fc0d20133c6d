"""One rank's part of a collective that is written as messages, on real tensors.

In: instructions of `program.hops`, links, the blocks of a tensor. Out: the same blocks, changed. A generator that
yields while another rank has to move first, as in the serial interpreter; between processes it never does.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from plait.program.instructions import Combine, Instruction, Recv, Send, Wait
from plait.program.value import Value
from plait.run.link.links import Finished, Handle, Links

Watch = Callable[[Instruction], None]
"""Told of every instruction once it is done."""


def run_hops(
    instructions: Sequence[Instruction], links: Links, blocks: Sequence[Tensor], watch: Watch = lambda _: None
) -> Iterator[None]:
    """Execute them; `blocks` are flat, each in memory of its own or a view of one tensor."""
    values = {Value.block(number): block for number, block in enumerate(blocks)}
    pending: dict[int, tuple[Recv, Handle]] = {}
    sent: list[Handle] = []
    for instruction in instructions:
        if isinstance(instruction, Send):
            handle = links.send(instruction, _packed([values[value] for value in instruction.reads]))
            if not isinstance(handle, Finished):
                sent.append(handle)
        elif isinstance(instruction, Recv):
            size = sum(blocks[value.number].nbytes for value in instruction.writes)
            room = torch.empty(size, dtype=torch.uint8, device=blocks[0].device)
            pending[instruction.id] = (instruction, links.receive(instruction, room))
        elif isinstance(instruction, Wait):
            recv, handle = pending.pop(instruction.of)
            while not handle.ready():
                yield
            _arrive(recv, handle.result(), values, blocks)
        else:
            assert isinstance(instruction, Combine)
            own, part = instruction.reads
            values[own].add_(values.pop(part))
        watch(instruction)
    for handle in sent:
        while not handle.ready():
            yield
        handle.result()


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    flat = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
    return flat.contiguous().view(torch.uint8)


def _arrive(recv: Recv, flat: Tensor, values: dict[Value, Tensor], blocks: Sequence[Tensor]) -> None:
    start = 0
    for value in recv.writes:
        block = blocks[value.number]
        part = flat[start : start + block.nbytes].view(block.dtype)
        start += block.nbytes
        if value.kind == "block":
            values[value].copy_(part)
        else:
            values[value] = part
