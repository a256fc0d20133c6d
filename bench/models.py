"""The jobs that the benchmarks train: a compute-bound and a communication-bound one, and those of the overhead tables.

In: a name in `CASES`. Out: a `Case` whose `job` is plain PyTorch in a `Job`; every system trains the same thing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.capture import GPT, token_loss
from plait.job.job import Job

NUM_SAMPLES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One thing to train."""

    bound: str
    """What limits it on a few cores: computation or communication."""
    job: Callable[[], Job]
    """Makes the job; the model is seeded by it."""
    block: int
    """Steps that are timed together."""
    single_batch: int
    """Samples a step on one process, so that a step takes 50 ms or more."""


def wide_mlp() -> nn.Module:
    """8.4 M parameters, 33.6 MB of gradients, and little to compute on a small batch."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1024)
    )


class ConvNet(nn.Module):
    """A plain convolutional network without batch norm, whose statistics other systems keep per rank."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.head = nn.Linear(width * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.stem(x)), 2)
        for index, layer in enumerate(self.body):
            h = h + F.relu(layer(h))
            h = F.max_pool2d(h, 2) if index in (1, 3) else h
        return self.head(h.flatten(1))


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip, as in ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


def resnet18(width: int = 16) -> nn.Module:
    """ResNet-18's eight blocks at a quarter of its width, for 32 x 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for block in range(2):
            outputs = width * 2**stage
            layers.append(Residual(inputs, outputs, 2 if block == 0 and stage > 0 else 1))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def _vectors(width: int, classes: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, width, generator=generator)
    return list(zip(x, torch.randint(classes, (NUM_SAMPLES,), generator=generator), strict=True))


def _images() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 3, 32, 32, generator=generator)
    return list(zip(x, torch.randint(10, (NUM_SAMPLES,), generator=generator), strict=True))


def _tokens() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(512, (NUM_SAMPLES, 129), generator=generator)
    return list(zip(x[:, :-1], x[:, 1:], strict=True))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _mlp_job(batch: int) -> Job:
    return Job(
        model=wide_mlp,
        data=_vectors(1024, 1024),
        loss=F.cross_entropy,
        optimizer=_sgd,
        batch=batch,
        epochs=10**6,
    )


def _gpt_job(batch: int) -> Job:
    return Job(
        model=lambda: GPT(2, 192, 6, 128, 512),
        data=_tokens(),
        loss=token_loss,
        optimizer=_adamw,
        batch=batch,
        epochs=10**6,
    )


def _image_job(model: Callable[[], nn.Module], batch: int) -> Job:
    return Job(model=model, data=_images(), loss=F.cross_entropy, optimizer=_sgd, batch=batch, epochs=10**6)


class Block(nn.Module):
    """A transformer block whose heads follow from the width that it is given, as the tutorial of DTensor asks for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BlockGPT(nn.Module):
    """A decoder of such blocks."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Parameter(torch.zeros(length, width)),
        )
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _flat_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _block_job(batch: int) -> Job:
    return Job(
        model=lambda: BlockGPT(6, 512, 8, 128, 512),
        data=_tokens(),
        loss=_flat_loss,
        optimizer=_adamw,
        batch=batch,
        epochs=10**6,
    )


CASES: Mapping[str, Case] = {
    "block_gpt": Case(bound="both", job=partial(_block_job, 4), block=2, single_batch=4),
    "gpt": Case(bound="computation", job=partial(_gpt_job, 8), block=3, single_batch=4),
    "conv": Case(bound="computation", job=partial(_image_job, ConvNet, 32), block=3, single_batch=16),
    "mlp": Case(bound="communication", job=partial(_mlp_job, 16), block=4, single_batch=128),
    "resnet": Case(bound="computation", job=partial(_image_job, resnet18, 32), block=3, single_batch=16),
}
