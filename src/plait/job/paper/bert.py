"""BERT on paper: an encoder with norms after each half of a block, trained on masked words.

In: a shape. Out: an `nn.Module` from (tokens, segments) to logits at every position.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.paper.attention import Attend, heads_of, merged
from plait.job.paper.shapes import TransformerShape


class BertBlock(nn.Module):
    """Attention and MLP, each added to its input and normed."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        hidden = shape.hidden
        width = shape.kv_heads * (hidden // shape.heads)
        self.q = nn.Linear(hidden, hidden, bias=shape.bias)
        self.k = nn.Linear(hidden, width, bias=shape.bias)
        self.v = nn.Linear(hidden, width, bias=shape.bias)
        self.attend = Attend(shape, causal=False)
        self.out = nn.Linear(hidden, hidden, bias=shape.bias)
        self.norm1 = nn.LayerNorm(hidden, bias=shape.bias)
        self.up = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, hidden, bias=shape.bias)
        self.norm2 = nn.LayerNorm(hidden, bias=shape.bias)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        q, k, v = (
            heads_of(layer(x), heads)
            for layer, heads in ((self.q, shape.heads), (self.k, shape.kv_heads), (self.v, shape.kv_heads))
        )
        attended = merged(self.attend(q, k, v))
        x = self.norm1(x + self.drop(self.out(attended)))
        normed: Tensor = self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))
        return normed


class Bert(nn.Module):
    """Tokens and segments to logits of the masked words."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.tokens = nn.Embedding(shape.vocab, hidden)
        self.positions = nn.Embedding(shape.seq, hidden)
        self.segments = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, bias=shape.bias)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()
        self.blocks = nn.ModuleList(BertBlock(shape) for _ in range(shape.layers))
        self.transform = nn.Linear(hidden, hidden, bias=shape.bias)
        self.head_norm = nn.LayerNorm(hidden, bias=shape.bias)
        self.head = nn.Linear(hidden, shape.vocab, bias=shape.bias)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.segments(segments)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(self.norm(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.head_norm(F.gelu(self.transform(x))))
        return logits
