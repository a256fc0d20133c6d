"""Attention as the models on paper use it: one fused kernel, or every score written out.

In: queries, keys and values [samples, heads, positions, width]. Out: the attended values, same layout.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.job.paper.shapes import TransformerShape


def attend(
    shape: TransformerShape, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, training: bool
) -> Tensor:
    """softmax(q k^T / sqrt(width)) v; dropout on the weights is a matter of the plain form only."""
    if shape.attention == "fused":
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=shape.kv_heads < shape.heads
        )
    if shape.kv_heads < shape.heads:
        k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]))
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    # Kernels of the time keep the weights in 16 bits; autocast would widen them.
    with torch.autocast(q.device.type, enabled=False):
        weights = torch.softmax(scores, -1)
    if shape.dropout:
        weights = F.dropout(weights, shape.dropout, training)
    return torch.matmul(weights, v)


class Attend(nn.Module):
    """`attend` as a module, so that a plan can name it: `memory.recompute=[blocks.*.attend]`."""

    def __init__(self, shape: TransformerShape, *, causal: bool) -> None:
        super().__init__()
        self.shape, self.causal = shape, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.shape, q, k, v, causal=self.causal, training=self.training)


def heads_of(x: Tensor, num_heads: int) -> Tensor:
    """[samples, positions, heads * width] -> [samples, heads, positions, width]."""
    samples, positions, width = x.shape
    return x.view(samples, positions, num_heads, width // num_heads).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[samples, heads, positions, width] -> [samples, positions, heads * width]."""
    return x.transpose(1, 2).flatten(2)
