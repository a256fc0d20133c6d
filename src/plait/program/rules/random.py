"""Counter-based random numbers: any piece can be drawn on its own, because an element depends on its place alone."""

import torch

from plait.program.rules.base import Op, R, Shard, Strategy, rule

plait = torch.ops.plait


@rule(plait.bernoulli, plait.uniform, plait.normal, plait.randint)
def random(op: Op) -> list[Strategy]:
    others = (R,) * len(op.tensors)
    return [Strategy(others, (Shard(dim),)) for dim in range(len(op.out)) if op.axis.divides(op.out[dim])]
