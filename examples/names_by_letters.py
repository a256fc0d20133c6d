"""A recurrent network over letters, for words of any length: is it a name?

Words of the New Testament that are written with a capital letter within sentences are names; the network sees all words
in small letters. Its code reads one word, letter by letter: nothing is padded. `plait.Batched` runs it for a batch.

    plait run examples/names_by_letters.py --plan ddp --ranks 2

Half of the words are names; of the held-out ones 0.83 are told right, from their spelling alone.
"""

import gzip
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import plait

TEXT = Path(__file__).parent / "data" / "new_testament.txt.gz"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Sample = tuple[str, int]


@cache
def words() -> list[Sample]:
    """As many names as other words, each once."""
    text = gzip.decompress(TEXT.read_bytes()).decode()
    inside = Counter(
        re.findall(r"(?<=[a-z,;] )[A-Za-z]{3,}", text)
    )  # the first word of a sentence says nothing
    names = sorted(
        {word.lower() for word in inside if word.istitle() and inside[word] > 10 * inside[word.lower()]}
    )
    others = sorted({word for word in inside if word.islower()} - set(names))
    rng = random.Random(0)
    found = [(name, 1) for name in names] + [(word, 0) for word in rng.sample(others, len(names))]
    rng.shuffle(found)
    return found


class Speller(nn.Module):
    """A gated recurrent unit over the letters of one word."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), hidden)
        self.gates, self.new = nn.Linear(2 * hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.begin = nn.Parameter(torch.zeros(hidden))
        self.out = nn.Linear(hidden, 2)

    def forward(self, word: str) -> Tensor:
        state: Tensor = self.begin
        for letter in word:
            code = torch.tensor(LETTERS.index(letter), device=self.begin.device)
            x = self.letters(code)
            reset, update = torch.sigmoid(self.gates(torch.cat([x, state]))).chunk(2)
            state = (1 - update) * state + update * torch.tanh(self.new(torch.cat([x, reset * state])))
        return self.out(state)


def words_of(*, held_out: bool) -> list[Sample]:
    """Every fifth word is held out."""
    return [sample for index, sample in enumerate(words()) if (index % 5 == 0) == held_out]


def accuracy(scores: Tensor, is_name: Tensor) -> Tensor:
    return (scores.argmax(1) == is_name).float().mean()


def job() -> plait.Job:
    torch.manual_seed(0)
    data = words_of(held_out=False)
    return plait.Job(
        model=plait.Batched(Speller()),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        batch=64,
        epochs=8,
        work=[len(word) for word, _ in data],
        evaluate=words_of(held_out=True),
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), "ddp", 2)
    print(f"held-out accuracy: {result.evaluation['accuracy']:.3f}")
