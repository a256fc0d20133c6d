"""Counter-based random numbers: any shard can be drawn on its own, because an element depends on its place alone."""

from plait.program.place.rules.base import Op, R, Shard, Strategy, ours, rule


@rule(ours.bernoulli, ours.uniform, ours.normal, ours.randint, outers=True)
def random(op: Op) -> list[Strategy]:
    """Shards of a dim; those of outer parts are taken out of all numbers, which every rank can draw."""
    others = (R,) * len(op.tensors)
    return [Strategy(others, (Shard(dim),)) for dim in range(len(op.out)) if op.axis.divides(op.out[dim])]
