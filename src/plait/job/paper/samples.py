"""Samples that look like a model's data and hold nothing: random words, random images.

In: a shape. Out: a Dataset of (inputs..., target), the same for the same index.
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from plait.job.paper.shapes import ImageShape, TransformerShape

_MASKED = 0.15
"""Share of tokens that BERT predicts (Devlin et al. 2019, section 3.1)."""
_IGNORE = -100
"""`ignore_index` of torch's cross-entropy."""


class TokenSamples(Dataset[tuple[Tensor, ...]]):
    """Random words; the target is the next word, or for bert the words that were masked."""

    def __init__(self, shape: TransformerShape, num_samples: int) -> None:
        self.shape = shape
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(index)
        seq, vocab = self.shape.seq, self.shape.vocab
        words = torch.randint(vocab, (seq + 1,), generator=generator)
        if self.shape.family != "bert":
            return words[:-1], words[1:]
        chosen = torch.rand(seq, generator=generator) < _MASKED
        chosen[0] = True
        tokens = words[:-1].masked_fill(chosen, 0)
        segments = (torch.arange(seq) >= seq // 2).long()
        return tokens, segments, words[:-1].masked_fill(~chosen, _IGNORE)


class ImageSamples(Dataset[tuple[Tensor, Tensor]]):
    """Random images with random classes."""

    def __init__(self, shape: ImageShape, num_samples: int) -> None:
        self.shape = shape
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(3, self.shape.image, self.shape.image, generator=generator)
        return image, torch.randint(self.shape.classes, (), generator=generator)
