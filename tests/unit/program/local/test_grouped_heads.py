"""Attention reads keys that heads share as they are: equal numbers, less kept, and nothing else is rewritten."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.program.compiled import graph_of
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from plait.plan.named import resolve
from plait.program.compile import compile_program
from plait.program.local.grouped_heads import with_grouped_heads
from plait.program.ranks import Settings

ours = torch.ops.plait
KINDS = (ours.attention.default, ours.attention_backward.default)


def interleaved(x: Tensor, count: int) -> Tensor:
    return x.repeat_interleave(count, 1)


def expanded(x: Tensor, count: int) -> Tensor:
    batch, groups, length, width = x.shape
    shown = x[:, :, None, :, :].expand(batch, groups, count, length, width)
    return shown.reshape(batch, groups * count, length, width)


def tiled(x: Tensor, count: int) -> Tensor:
    return x.repeat(1, count, 1, 1)


def step(q: Tensor, k: Tensor, v: Tensor, repeat: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
    keys, values = repeat(k, 4), repeat(v, 4)
    out, lse = ours.attention(q, keys, values, None, True, 0.5)
    return [out, *ours.attention_backward(out.cos(), q, keys, values, out, lse, None, True, 0.5)]


@pytest.mark.parametrize(("repeat", "found"), [(interleaved, True), (expanded, True), (tiled, False)])
def test_shared_keys_are_read_as_they_are(repeat: Callable[[Tensor, int], Tensor], found: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 8, 5, 4, generator=generator)
    k, v = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(2))
    module = make_fx(lambda q, k, v: step(q, k, v, repeat), tracing_mode="fake")(q, k, v)
    wanted = module(q, k, v)
    with_grouped_heads(module.graph)
    keys = [n.args[1 if n.target is KINDS[0] else 2] for n in module.graph.nodes if n.target in KINDS]
    assert {key.meta["val"].shape[1] for key in keys} == {2 if found else 8}
    made = GraphModule(module, module.graph)(q, k, v)
    assert all(map(torch.equal, made, wanted))


def test_a_model_with_grouped_queries_keeps_its_keys_once() -> None:
    settings = Settings(clip_norm=None, batch_norm="global", device=torch.device("cpu"))
    for plan, ranks in (("single", 1), ("ddp", 2)):
        program = compile_program({4: graph_of("hf_llama", 4)}, resolve(plan, ranks, {}), (4,), settings)
        nodes = [n for s in program.of(0).segments.values() for n in s.nodes if n.target in KINDS]
        assert nodes and all(keys < queries for queries, keys in map(heads_of, nodes))


def heads_of(node: Any) -> tuple[int, int]:
    """Of queries, and of keys."""
    at = 0 if node.target is KINDS[0] else 1
    return node.args[at].meta["val"].shape[1], node.args[at + 1].meta["val"].shape[1]
