"""Whole models on meshes of `data` and `tensor`: outputs are those of one rank; heads, classes and experts stay cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.program.on_mesh import Ran, place, real_inputs, run_on_mesh, run_whole
from tests.zoo import ZOO, Case, images, token_loss, tokens
from torch import Tensor, nn

from plait.graph.from_job import Captures
from plait.graph.graph import Graph
from plait.plan.plan import DATA
from plait.program.place.placement import AxisShares, Placement, R, Shard
from plait.program.place.propagate import Placements

WIDTH, HEADS, EXPERTS, VOCABULARY = 32, 4, 4, 64
S = Shard


class Attention(nn.Module):
    """Self-attention with a fused projection whose output is taken apart in one of the ways that people write."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        both = self.qkv(x)
        size = WIDTH // HEADS
        if self.kind == "chunk":
            q, k, v = (y.view(b, t, HEADS, size).transpose(1, 2) for y in both.chunk(3, -1))
        elif self.kind == "slices":
            parts = (both[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3))
            q, k, v = (y.reshape(b, t, HEADS, size).transpose(1, 2) for y in parts)
        elif self.kind == "permute":
            q, k, v = both.view(b, t, 3, HEADS, size).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.kind == "select":
            parts = both.reshape(b, t, 3, HEADS, size).permute(2, 0, 3, 1, 4)
            q, k, v = parts[0], parts[1], parts[2]
        else:  # each head has its q, k and v side by side
            q, k, v = both.view(b, t, HEADS, 3 * size).transpose(1, 2).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class GroupedQueries(nn.Module):
    """Fewer heads of keys and values than of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH // 2),
            nn.Linear(WIDTH, WIDTH // 2),
        )
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for y in (self.q(x), self.k(x), self.v(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class DenseExperts(nn.Module):
    """Every expert sees every token, weighted by the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 48))
        self.down = nn.Parameter(torch.randn(EXPERTS, 48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        hidden = torch.einsum("btd,edh->ebth", x, self.up).relu()
        return torch.einsum("ebth,ehd,bte->btd", hidden, self.down, gate)


class ExpertsWithCapacity(nn.Module):
    """Each token goes to its best experts, as long as these have room."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 48))
        self.down = nn.Parameter(torch.randn(EXPERTS, 48, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        capacity = flat.shape[0] // 2
        chances, experts = self.gate(flat).softmax(-1).topk(2, -1)
        chosen = F.one_hot(experts, EXPERTS).reshape(-1, EXPERTS)
        slot = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = slot < capacity
        where = experts.reshape(-1) * capacity + slot.clamp(max=capacity - 1)
        sent = flat.repeat_interleave(2, 0) * kept.unsqueeze(-1)
        room = flat.new_zeros(EXPERTS * capacity, WIDTH).index_add(0, where, sent)
        hidden = torch.bmm(room.view(EXPERTS, capacity, WIDTH), self.up).relu()
        answers = torch.bmm(hidden, self.down).view(-1, WIDTH)[where] * kept.unsqueeze(-1)
        return (answers.view(-1, 2, WIDTH) * chances.unsqueeze(-1)).sum(1).view_as(x)


class Dropped(nn.Module):
    """Dropout on hidden activations, which are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x).relu(), 0.3))


class Language(nn.Module):
    """Embedding, one layer, logits."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = layer()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        return self.head(y + self.layer(self.norm(y)))


def channels() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 1),
        ),
        *(
            nn.ConvTranspose2d(6, 4, 2, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 10),
        ),
    )


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(
        output.flatten(0, 1), target.flatten().masked_fill(target.flatten() == 5, -100), label_smoothing=0.1
    )


def weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, VOCABULARY, dtype=output.dtype)
    return F.cross_entropy(output.transpose(1, 2), target, weight=weight, ignore_index=7)


@dataclass(frozen=True)
class Cut:
    """A model and the parameters that are cut, by a part of their names."""

    case: Case
    parameters: Mapping[str, Placement]
    gathers: bool = False
    """Whether something is made whole because no rule keeps it cut."""


VOCABULARY_CUT = {"tokens": S(0), "head": S(0)}
FUSED = {**VOCABULARY_CUT, "qkv": S(0, 3), "out.weight": S(1)}
EXPERTS_CUT = {**VOCABULARY_CUT, "up": S(0), "down": S(0)}
GPT = {"tokens": S(0), "qkv": S(0, 3), "out.weight": S(1), "mlp.0": S(0), "mlp.2.weight": S(1), "head": S(0)}


def _language(layer: Callable[[], nn.Module], loss: Callable[..., Tensor] = token_loss) -> Case:
    return Case(model=lambda: Language(layer), samples=tokens, loss=loss)


MODELS: dict[str, Cut] = {
    **{
        f"attention_{kind}": Cut(_language(lambda kind=kind: Attention(kind)), FUSED)  # type: ignore[misc]
        for kind in ("chunk", "slices", "permute", "select")
    },
    "attention_by_head": Cut(_language(lambda: Attention("by head")), FUSED | {"qkv": S(0)}),
    "grouped_queries": Cut(
        _language(GroupedQueries), {**VOCABULARY_CUT, "out.weight": S(1), ".q": S(0), ".k": S(0), ".v": S(0)}
    ),
    "packed_attention": Cut(ZOO["encoder"], {"in_proj": S(0, 3), "out_proj.weight": S(1), "linear1": S(0)}),
    "dense_experts": Cut(_language(DenseExperts), EXPERTS_CUT),
    "experts_with_capacity": Cut(_language(ExpertsWithCapacity), EXPERTS_CUT, gathers=True),
    "label_smoothing": Cut(_language(nn.Identity, smoothed), VOCABULARY_CUT),
    "class_weights": Cut(_language(nn.Identity, weighted), VOCABULARY_CUT),
    "gpt_dropout": Cut(ZOO["gpt_dropout"], GPT),
    "dropped": Cut(_language(Dropped), {**VOCABULARY_CUT, "up": S(0), "down.weight": S(1)}),
    "gpt_tied": Cut(ZOO["gpt_tied"], GPT),
    "channels": Cut(
        Case(model=channels, samples=images, loss=nn.CrossEntropyLoss()),
        {"0.": S(0), "2.": S(0), "4.weight": S(1), "5.weight": S(1), "5.bias": S(0)},
    ),
}
MESHES = ({DATA: (4,), "tensor": (1, 1)}, {DATA: (1, 3), "tensor": (1, 1)}, {DATA: (4, 0), "tensor": (1, 1)})


@cache
def graph_of(name: str) -> Graph:
    case = MODELS[name].case
    return Captures(case.job(batch=4, steps=1, num_samples=4), None, torch.float64).of_size(4)


@cache
def whole(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(inputs, outputs) of one rank."""
    graph = graph_of(name)
    inputs = real_inputs(graph, MODELS[name].case.samples(4, 0))
    return inputs, run_whole(graph, inputs)


def placed(name: str, mesh: Mapping[str, Any]) -> list[Placements]:
    chosen: list[Placements] = []
    for axis, units in mesh.items():
        parameters = {} if axis == DATA else MODELS[name].parameters
        chosen.append(place(graph_of(name), AxisShares(name=axis, units=units), parameters, chosen))
    return chosen


def ran(name: str, mesh: Mapping[str, Any]) -> Ran:
    return run_on_mesh(graph_of(name), placed(name, mesh), whole(name)[0])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_one_rank(name: str, mesh: Mapping[str, Any]) -> None:
    """In float64, to rounding; what is 0 on paper (the gradient of the bias of keys) is seen beside the largest."""
    expected, found = whole(name)[1], ran(name, mesh).outputs
    assert set(found) == set(expected)
    scale = max(float(value.abs().max()) for value in expected.values())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12 * scale, msg=key)


@pytest.mark.parametrize("name", [name for name, cut in MODELS.items() if not cut.gathers])
def test_nothing_is_made_whole_for_want_of_a_rule(name: str) -> None:
    assert [entry for p in placed(name, MESHES[0]) for entry in p.gathered] == []


@pytest.mark.parametrize("name", ["attention_chunk", "label_smoothing", "class_weights"])
def test_logits_are_never_whole(name: str) -> None:
    """No rank has a float tensor with all classes of all tokens (`expand` makes none: it looks at one number)."""
    chosen = placed(name, MESHES[0])[1]
    sizes = [
        node.meta["val"].numel()
        for node, placements in chosen.outputs.items()
        if isinstance(node.meta["val"], Tensor)
        and node.meta["val"].is_floating_point()
        and placements[0] == R
        and node.target is not torch.ops.aten.expand.default
    ]
    assert max(sizes) <= 4 * 8 * WIDTH


def test_dropout_is_drawn_in_pieces() -> None:
    """Each rank draws its own part of a mask, of its own samples and of its own part of their activations."""
    chosen = placed("dropped", MESHES[1])
    (mask,) = (node for node in graph_of("dropped").ops() if "bernoulli" in str(node.target))
    assert [placements.of(mask) for placements in chosen] == [Shard(0), Shard(2)]
