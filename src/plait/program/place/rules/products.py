"""Matrix products, convolutions, attention, embeddings: where weights meet activations."""

from plait.program.place.rules.base import Op, P, R, Shard, Strategy, aten, ours, rule


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
    """The added term is cut like the output where it is not broadcast; where ranks add up, each adds a part of it."""
    ndim = len(op.out)
    found = [
        Strategy((P, Shard(ndim - 1), Shard(ndim - 2)), (P,)),
        Strategy((P, P, R), (P,)),
        Strategy((P, R, P), (P,)),
    ]
    for dim in range(ndim):
        own = dim - (ndim - len(op.shapes[0]))
        term = Shard(own) if own >= 0 and op.shapes[0][own] == op.out[dim] and op.out[dim] != 1 else R
        left, right = (R, Shard(dim)) if dim == ndim - 1 else (Shard(dim), R)
        if ndim == 3 and dim == 0:
            right = Shard(0)
        found.append(Strategy((term, left, right), (Shard(dim),)))
    return found


@rule(ours.grouped_product)
def grouped_product(op: Op) -> list[Strategy]:
    """Columns and rows of all matrices; which rows form a group is known to all."""
    return [
        Strategy((R, Shard(2), R), (Shard(1),)),
        Strategy((Shard(1), Shard(1), R), (P,)),
        Strategy((P, R, R), (P,)),
        Strategy((R, P, R), (P,)),
    ]


@rule(ours.grouped_outer)
def grouped_outer(op: Op) -> list[Strategy]:
    return [
        Strategy((Shard(1), R, R), (Shard(1),)),
        Strategy((R, Shard(1), R), (Shard(2),)),
        Strategy((P, R, R), (P,)),
        Strategy((R, P, R), (P,)),
    ]


@rule(aten.mv)
def mv(op: Op) -> list[Strategy]:
    return [
        Strategy((Shard(0), R), (Shard(0),)),
        Strategy((Shard(1), Shard(0)), (P,)),
        Strategy((P, R), (P,)),
        Strategy((R, P), (P,)),
    ]


@rule(aten.dot)
def dot(op: Op) -> list[Strategy]:
    return [Strategy((Shard(0), Shard(0)), (P,)), Strategy((P, R), (P,)), Strategy((R, P), (P,))]


@rule(aten.convolution, outers=True)
def convolution(op: Op) -> list[Strategy]:
    """Samples; channels that go out; channels that come in, which add up; groups of channels, which are independent."""
    if len(op.shapes[0]) != len(op.shapes[1]):
        return []
    found = [op.by_name((P,), input=P, bias=P), op.by_name((P,), weight=P, bias=P)]
    into, out_of = _channels(op)
    for outer in _outers(op):
        one, cut = Shard(1, outer), Shard(0, outer)
        found.append(op.by_name((cut,), input=cut))
        if op.arg("groups") == 1:
            found.append(op.by_name((one,), weight=Shard(out_of, outer), bias=cut))
            found.append(op.by_name((P,), input=one, weight=Shard(into, outer), bias=P))
        elif _has_whole_groups(op, outer):
            found.append(op.by_name((one,), input=one, weight=cut, bias=cut))
    return found


@rule(aten.convolution_backward, outers=True)
def convolution_backward(op: Op) -> list[Strategy]:
    found = [op.by_name((P, P, P), grad_output=P)]
    into, out_of = _channels(op)
    for outer in _outers(op):
        one, cut = Shard(1, outer), Shard(0, outer)
        found.append(op.by_name((cut, P, P), grad_output=cut, input=cut))
        if op.arg("groups") == 1:
            made, taken = Shard(out_of, outer), Shard(into, outer)
            found.append(op.by_name((P, made, cut), grad_output=one, weight=made))
            found.append(op.by_name((one, taken, R), input=one, weight=taken))
        elif _has_whole_groups(op, outer):
            found.append(op.by_name((one, cut, cut), grad_output=one, input=one, weight=cut))
    return found


def _channels(op: Op) -> tuple[int, int]:
    """The dims of the weight that hold the channels that come in, and those that go out."""
    return (0, 1) if op.arg("transposed") else (1, 0)


def _outers(op: Op) -> list[int]:
    return sorted({1, *op.outers})


def _has_whole_groups(op: Op, outer: int) -> bool:
    groups = int(op.arg("groups"))
    return groups % outer == 0 and op.axis.divides(groups // outer)


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
    """A rank that has some of the rows finds those that it has; the others add them."""
    found = [Strategy((R, Shard(dim)), (Shard(dim),)) for dim in range(len(op.shapes[1]))]
    last = len(op.out) - 1
    return [
        *found,
        Strategy((Shard(1), R), (Shard(last),)),
        Strategy((Shard(0), R), (P,)),
        Strategy((P, R), (P,)),
    ]


@rule(aten.embedding_dense_backward)
def embedding_backward(op: Op) -> list[Strategy]:
    found = [
        Strategy((Shard(len(op.shapes[0]) - 1), R), (Shard(1),)),
        Strategy((R, R), (Shard(0),)),
        Strategy((P, R), (P,)),
    ]
    if op.arg("scale_grad_by_freq"):  # counts how often an index occurs in the whole batch
        return found
    return [*(Strategy((Shard(dim), Shard(dim)), (P,)) for dim in range(len(op.shapes[1]))), *found]
