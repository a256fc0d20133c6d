"""Static or dynamic, lecture 003's quiz: which of its programs is which, by capturing them.

python -m examples.lectures.lecture003_static_or_dynamic
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.lecture003_tree_lstm import TreeLSTM
from torch import Tensor, nn

import plait


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Decoder(nn.Module):
    """A transformer decoder of one layer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layer(self.words(tokens), mask, is_causal=True)).flatten(0, 1)


class Generates(Decoder):
    """Serving: words are appended until one is the end; how many is known when they are."""

    def forward(self, tokens: Tensor) -> Tensor:
        while tokens.shape[1] < 12:
            word = super().forward(tokens).unflatten(0, tokens.shape)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, word], dim=1)
            if int(word[0]) == 0:
                break
        return super().forward(tokens)


class Sentence(nn.Module):
    """A tree-LSTM by Python's recursion over a nested sample."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeLSTM()

    def forward(self, trees: Any) -> Tensor:
        return torch.stack([self.tree(one) for one in trees])


def job(
    model: Callable[[], nn.Module], data: list[Any], loss: Callable[..., Tensor], **more: Any
) -> plait.Job:
    return plait.Job(
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch=2,
        steps=1,
        **more,
    )


def verdict(given: plait.Job) -> tuple[str, str]:
    """Static, static for each shape, or dynamic; and why."""
    found = plait.verdict(given)
    return found.kind, found.line().replace(f"{Path(__file__).parents[2]}/", "")


def _of_any(output: Tensor, *_: Any) -> Tensor:
    return output.square().mean()


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sentences to the length of the longest of them."""
    tokens = nn.utils.rnn.pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return tokens, torch.stack([target for _, target in samples])


def quiz() -> dict[str, tuple[str, str]]:
    images = [(torch.randn(3, 8, 8), torch.tensor(0)) for _ in range(4)]
    words = [(torch.randint(0, 50, (6 + at,)), torch.tensor(0)) for at in range(4)]
    trees = [((1, (2, 3)), 0), (((4, 5), (6, 7)), 0)]
    return {
        "CNN, training": verdict(job(CNN, images, nn.CrossEntropyLoss())),
        "CNN, inference": verdict(job(CNN, images, nn.CrossEntropyLoss())),
        "GPT (decoder), training": verdict(job(Decoder, words, _of_any, collate=padded)),
        "GPT inference, batch 1, word after word": verdict(job(Generates, words, _of_any, collate=padded)),
        "GPT serving, several requests": verdict(job(Generates, words, _of_any, collate=padded)),
        "tree-LSTM": verdict(
            job(Sentence, trees, _of_any, collate=lambda samples: ([t for t, _ in samples], 0))
        ),
    }


def exhibit() -> Exhibit:
    found = quiz()
    return Exhibit(
        lecture="003",
        title="Static or dynamic? The lecture's quiz, answered by `plait graph`",
        idea="A static graph is defined once and runs for every batch; a dynamic one depends on the "
        "sample. The lecture asks which of its programs is which. Capturing tells: what gives one graph "
        "for all inputs is static; where a value or a sample's structure decides what runs, capture "
        "names the line.",
        numbers=[Number(what=name, ours=answer) for name, (answer, _) in found.items()],
        tables=[
            Table(
                title="Why",
                columns=["program", "verdict", "why"],
                rows=[[n, *both] for n, both in found.items()],
            )
        ],
        seen="Training a decoder is static for each length, and padding makes one length of many. "
        "Generating is dynamic because the next word decides whether there is another; a server of many "
        "requests has that for each of them.",
    )


if __name__ == "__main__":
    show(exhibit())
