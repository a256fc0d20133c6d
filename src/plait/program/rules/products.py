"""Matrix products, convolutions, attention, embeddings: where weights meet activations."""

from plait.program.rules.base import Op, P, R, Shard, Strategy, aten, ours, rule


@rule(aten.mm)
def mm(op: Op) -> list[Strategy]:
    return [
        Strategy((Shard(0), R), (Shard(0),)),
        Strategy((R, Shard(1)), (Shard(1),)),
        Strategy((Shard(1), Shard(0)), (P,)),
        Strategy((P, R), (P,)),
        Strategy((R, P), (P,)),
    ]


@rule(aten.bmm)
def bmm(op: Op) -> list[Strategy]:
    return [
        Strategy((Shard(0), Shard(0)), (Shard(0),)),
        Strategy((Shard(1), R), (Shard(1),)),
        Strategy((R, Shard(2)), (Shard(2),)),
        Strategy((Shard(2), Shard(1)), (P,)),
        Strategy((P, R), (P,)),
        Strategy((R, P), (P,)),
    ]


@rule(aten.addmm, aten.baddbmm)
def addmm(op: Op) -> list[Strategy]:
    """The added term is cut like the output where it is not broadcast. Contracted shards would add it once a rank."""
    found = []
    ndim = len(op.out)
    for dim in range(ndim):
        own = dim - (ndim - len(op.shapes[0]))
        term = Shard(own) if own >= 0 and op.shapes[0][own] == op.out[dim] and op.out[dim] != 1 else R
        left, right = (R, Shard(dim)) if dim == ndim - 1 else (Shard(dim), R)
        if ndim == 3 and dim == 0:
            right = Shard(0)
        found.append(Strategy((term, left, right), (Shard(dim),)))
    return found


@rule(aten.mv)
def mv(op: Op) -> list[Strategy]:
    return [Strategy((Shard(0), R), (Shard(0),)), Strategy((Shard(1), Shard(0)), (P,))]


@rule(aten.dot)
def dot(op: Op) -> list[Strategy]:
    return [Strategy((Shard(0), Shard(0)), (P,))]


@rule(aten.convolution)
def convolution(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(0),), input=Shard(0))] if len(op.shapes[0]) == len(op.shapes[1]) else []


@rule(aten.convolution_backward)
def convolution_backward(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(0), P, P), grad_output=Shard(0), input=Shard(0))]


@rule(ours.attention, ours.attention_backward, aten._scaled_dot_product_flash_attention_for_cpu)
def attention(op: Op) -> list[Strategy]:
    """Samples and heads are independent; a mask that is broadcast over them stays whole."""
    found = []
    for dim in (0, 1):
        extent = op.shapes[0][dim]
        inputs = tuple(Shard(dim) if len(s) > dim and s[dim] == extent else R for s in op.shapes)
        alike = all(s[dim] in (1, extent) for s in op.shapes if len(s) > dim)
        if alike and extent != 1:
            found.append(Strategy(inputs, tuple(Shard(dim) for _ in op.outputs)))
    return found


@rule(aten.embedding)
def embedding(op: Op) -> list[Strategy]:
    found = [Strategy((R, Shard(dim)), (Shard(dim),)) for dim in range(len(op.shapes[1]))]
    return [*found, Strategy((Shard(1), R), (Shard(len(op.out) - 1),))]


@rule(aten.embedding_dense_backward)
def embedding_backward(op: Op) -> list[Strategy]:
    found = [Strategy((Shard(len(op.shapes[0]) - 1), R), (Shard(1),)), Strategy((P, R), (P,))]
    if op.arg("scale_grad_by_freq"):  # counts how often an index occurs in the whole batch
        return found
    return [*(Strategy((Shard(dim), Shard(dim)), (P,)) for dim in range(len(op.shapes[1]))), *found]
