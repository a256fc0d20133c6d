"""Recurrent layers: samples are independent, time is not. The workspace belongs to the rank that made it."""

from plait.program.place.rules.base import Op, P, R, Shard, Strategy, ours, rule


@rule(ours.lstm_layer)
def lstm_layer(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(1), Shard(0), Shard(0), R), x=Shard(1), h=Shard(0), c=Shard(0))]


@rule(ours.lstm_layer_backward)
def lstm_layer_backward(op: Op) -> list[Strategy]:
    sequences = dict.fromkeys(("grad_y", "x", "y"), Shard(1))
    states = dict.fromkeys(("grad_h", "grad_c", "h", "c", "last_h", "last_c"), Shard(0))
    return [op.by_name((Shard(1), P, P, P, P, Shard(0), Shard(0)), **sequences, **states)]


@rule(ours.rnn_layer)
def rnn_layer(op: Op) -> list[Strategy]:
    return [op.by_name((Shard(1), Shard(0), Shard(1), R), x=Shard(1), h=Shard(0))]


@rule(ours.rnn_layer_backward)
def rnn_layer_backward(op: Op) -> list[Strategy]:
    sequences = dict.fromkeys(("grad_y", "x", "y", "gates"), Shard(1))
    return [op.by_name((Shard(1), P, P, P, P, Shard(0)), **sequences, grad_h=Shard(0), h=Shard(0))]
