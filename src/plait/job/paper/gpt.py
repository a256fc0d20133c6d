"""GPT-2 and GPT-3 on paper: learned positions, norms before each half of a block, a GELU MLP.

In: a shape. Out: an `nn.Module` from tokens [samples, positions] to logits.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.paper.attention import Attend, heads_of, merged
from plait.job.paper.shapes import TransformerShape


class GPTBlock(nn.Module):
    """Attention and MLP, each added to the stream."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden, shape.hidden // shape.heads
        self.key_width = shape.kv_heads * width
        self.norm1 = nn.LayerNorm(hidden, bias=shape.bias)
        self.qkv = nn.Linear(hidden, hidden + 2 * self.key_width, bias=shape.bias)
        self.attend = Attend(shape, causal=True)
        self.out = nn.Linear(hidden, hidden, bias=shape.bias)
        self.norm2 = nn.LayerNorm(hidden, bias=shape.bias)
        self.up = nn.Linear(hidden, shape.ffn, bias=shape.bias)
        self.down = nn.Linear(shape.ffn, hidden, bias=shape.bias)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shape = self.shape
        q, k, v = self.qkv(self.norm1(x)).split([shape.hidden, self.key_width, self.key_width], dim=2)
        q, k, v = heads_of(q, shape.heads), heads_of(k, shape.kv_heads), heads_of(v, shape.kv_heads)
        x = x + self.drop(self.out(merged(self.attend(q, k, v))))
        narrow: Tensor = self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + narrow


class GPT(nn.Module):
    """Tokens to logits of the next one."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden)
        self.drop = nn.Dropout(shape.dropout) if shape.dropout else nn.Identity()
        self.blocks = nn.ModuleList(GPTBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
