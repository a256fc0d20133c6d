"""Llama 3 on paper: rotary positions, grouped key and value heads, RMS norms, a gated MLP.

In: a shape. Out: an `nn.Module` from tokens [samples, positions] to logits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.paper.attention import Attend, heads_of, merged
from plait.job.paper.shapes import TransformerShape

_ROTARY_BASE = 500_000.0
"""Theta of Llama 3 ("The Llama 3 Herd of Models", 2024, section 3.2)."""


def rotations(positions: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, width] of every position's rotation."""
    frequency = _ROTARY_BASE ** (-torch.arange(0, width, 2).float() / width)
    angle = torch.outer(torch.arange(positions).float(), frequency)
    angle = torch.cat((angle, angle), dim=1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + width / 2) turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class LlamaBlock(nn.Module):
    """Attention and gated MLP, each added to the stream."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden, shape.hidden // shape.heads
        self.norm1 = nn.RMSNorm(hidden, eps=1e-5)
        self.q = nn.Linear(hidden, hidden, bias=shape.bias)
        self.k = nn.Linear(hidden, shape.kv_heads * width, bias=shape.bias)
        self.v = nn.Linear(hidden, shape.kv_heads * width, bias=shape.bias)
        self.attend = Attend(shape, causal=True)
        self.out = nn.Linear(hidden, hidden, bias=shape.bias)
        self.norm2 = nn.RMSNorm(hidden, eps=1e-5)
        self.gate = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.up = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, hidden, bias=shape.bias)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        normed = self.norm1(x)
        q, k, v = (
            heads_of(layer(normed), heads)
            for layer, heads in ((self.q, shape.heads), (self.k, shape.kv_heads), (self.v, shape.kv_heads))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.drop(self.out(merged(self.attend(q, k, v))))
        normed = self.norm2(x)
        narrow: Tensor = self.drop(self.down(F.silu(self.gate(normed)) * self.up(normed)))
        return x + narrow


class Llama(nn.Module):
    """Tokens to logits of the next one."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight
        cos, sin = rotations(shape.seq, shape.hidden // shape.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits
