"""Names for what can be timed once and looked up later: ops by their shapes, updates, exchanges.

In: a node, an instruction. Out: text that is equal where the same work is done. A time holds for the load under which
it was taken, so each name begins with the number of ranks that were busy on the host.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from plait.plan.decisions import Sync
from plait.program.instructions import Collective, Compress, Decompress, Instruction, Send
from plait.program.program import Bucket, Program

_LONG = 300
"""Characters after which a key is cut and hashed: keys are read by people, in files of a cluster."""


def op_key(node: fx.Node, busy: int) -> str:
    """`2|aten.mm.default(float32[16,1024], float32[1024,2048]/1,1024)`."""
    parts = [_told(argument) for argument in node.args]
    parts += [f"{name}={_told(value)}" for name, value in node.kwargs.items()]
    return _short(f"{busy}|{node.target}({', '.join(parts)})")


def update_key(optimizer: str, shapes: Iterable[tuple[int, ...]], busy: int) -> str:
    """One step of an optimizer on tensors of these shapes."""
    every = list(shapes)
    count = sum(torch.Size(shape).numel() for shape in every)
    digest = sha256(repr(every).encode()).hexdigest()[:12]
    return f"{busy}|update {optimizer} of {len(every)} tensors, {count} elements ({digest})"


def transfer_key(instruction: Collective | Send, size: int, busy: int) -> str:
    """A collective of `size` ranks, or a message; buckets and chunks lie where links find them."""
    if isinstance(instruction, Send):
        return f"{busy}|send {instruction.num_bytes}"
    place = "placed " if is_placed(instruction) else ""
    return f"{busy}|{place}{instruction.op} {instruction.num_bytes} over {size}"


def rehearsed_key(program: Program, rank: int, kind: type[Instruction], name: str, busy: int) -> str:
    """What an instruction takes of a processor in steps of its program; of what is under way, for all of it."""
    return f"{rehearsed_prefix(program, busy)}{program.members[rank]}: {kind.__name__} {name}"


def rehearsed_prefix(program: Program, busy: int) -> str:
    """Of all these keys of a program."""
    return f"{busy}|rehearsed {program.digest()[:12]}, class "


def compress_key(instruction: Compress | Decompress, bucket: Bucket, sync: Sync, busy: int) -> str:
    """What is done to a bucket so that less of it travels, or back."""
    what = f"compress, part {instruction.part}" if isinstance(instruction, Compress) else "decompress"
    how = f"{sync.compress} {sync.compress_rank} {sync.compress_keep:g}"
    digest = sha256(repr((bucket.shapes, bucket.dtype)).encode()).hexdigest()[:12]
    return f"{busy}|{what}: {how} of {bucket.num_elements} elements ({digest})"


def is_placed(instruction: Collective | Send) -> bool:
    """Whether what is exchanged lies where links find it."""
    return bool(instruction.reads) and instruction.reads[0].kind in ("bucket", "chunk")


def _told(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _tensor(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_told(entry) for entry in value)}]"
    if isinstance(value, torch.device):
        return "device"
    return str(value)


def _tensor(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "?" if value is None else str(type(value).__name__)
    text = (
        f"{str(value.dtype).removeprefix('torch.')}[{','.join(str(int(extent)) for extent in value.shape)}]"
    )
    return text if value.is_contiguous() else f"{text}/{','.join(str(int(step)) for step in value.stride())}"


def _short(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}#{sha256(text.encode()).hexdigest()[:12]}"
