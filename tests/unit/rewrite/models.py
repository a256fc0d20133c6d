"""Small models in which there is something to rewrite."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from plait.job.job import Job


class Block(nn.Module):
    """Attention and a gated MLP, every product on its own; keys and values may have fewer heads."""

    def __init__(self, width: int = 16, size: int = 8, keys: int = 16) -> None:
        super().__init__()
        self.size, self.groups = size, width // keys
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, out) for out in (width, keys, keys))
        self.out = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if self.groups > 1:
            k, v = (one.repeat_interleave(self.groups, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: int = 2, width: int = 16, *, size: int = 8, keys: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.Sequential(*(Block(width, size, keys) for _ in range(blocks)))
        self.head = nn.Linear(width, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class Scores(nn.Module):
    """Attention by hand: its scores, many for few features, are divided by a number."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        shares = torch.softmax(q @ k.transpose(-1, -2) / 3.0, -1)
        return (shares @ v).transpose(1, 2).flatten(2)


class Masked(nn.Module):
    """A product with what depends on nothing: a mask and positions, made anew in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(8, 8)) * 0.5
        positions = torch.sin(torch.arange(len(x) * 8).reshape(len(x), 8) / 3.0)
        return self.layer(x + positions) @ mask


class Wide(nn.Module):
    """(X W1) W2 with a middle that is wider than both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(8, 256) / 16)
        self.second = nn.Parameter(torch.randn(256, 8) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first @ self.second


class Towers(nn.Module):
    """Towers on one input whose results are joined and scaled, and weights that are joined by the model itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(nn.Linear(8, 6) for _ in range(4))
        self.last = nn.Linear(24, 8)
        self.one, self.two = (nn.Parameter(torch.randn(4, 8) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([F.relu(tower(x)) for tower in self.towers], 1)
        return self.last(joined) + (x @ torch.cat([self.one, self.two]).t()) * 0.25 * 0.5


class Joined(nn.Module):
    """Weights and inputs joined in several ways, also with themselves, and products scaled by numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(4, 8) for _ in range(3))
        self.square = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.weights
        y = F.linear(x, torch.cat([one, two]), torch.cat([self.bias, self.bias]))
        y = y + (x @ torch.cat([two, one]).t()) * -2 + x @ torch.cat([three, three]).t()
        twice = torch.cat([x, x], 1)
        joined = torch.cat([x, torch.cat([x, x * 1.0], 1)], 1)
        return y + joined[:, 4:12] + twice[:, 8:] + 0.3 * (0.5 * (x @ self.square))


class Convolutions(nn.Module):
    """Two convolutions on one input, joined along channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Conv2d(4, 2, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], 1)


class Orders(nn.Module):
    """Elementwise functions of dims in another order, and of a view; both are undone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        turned = F.silu(torch.relu((x * self.weight).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return torch.tanh(turned.flatten(1)).unflatten(1, (4, 5, 6))


class Kernels(nn.Module):
    """Convolutions of one input by kernels of other shapes, whose middles meet the same pixels."""

    def __init__(self, *kernels: tuple[int, int], bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 1, 1, bias=False)
        self.branches = nn.ModuleList(
            nn.Conv2d(1, 1, size, padding=(size[0] // 2, size[1] // 2), bias=bias) for size in kernels
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return sum((branch(x) for branch in self.branches), x)


class Branches(nn.Module):
    """Two blocks of three branches, added to what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branches: Any
        for branches in self.blocks:
            one, two, three = (torch.relu(branch(x)) for branch in branches)
            x = x + one * two + three
        return x


def next_token(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def language_job(blocks: int = 2) -> Job:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(20, (32, 9), generator=generator)
    return Job(
        model=lambda: Language(blocks),
        data=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        objective=next_token,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        batch=8,
        steps=2,
    )


def job_of(model: Any, *shape: int, out: tuple[int, ...]) -> Job:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(32, *own, generator=generator) for own in (shape, out))
    return Job(
        model=model,
        data=TensorDataset(x, y),
        objective=squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=32,
        steps=2,
    )
