"""A character LSTM on the New Testament: the recurrent counterpart of `char_gpt.py`.

    plait run examples/lstm_text.py --plan ddp --ranks 2
    python examples/lstm_text.py

Held-out loss falls to about 1.65 nats a character; knowing only how frequent each letter is gives 3.01.
"""

import gzip
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

DATA = Path(__file__).parent / "data" / "new_testament.txt.gz"
LENGTH, VOCAB, WIDTH = 64, 128, 128


def text(*, held_out: bool = False) -> TensorDataset:
    """Windows of the text as ASCII codes, each with the same window one character on; the last tenth is held out."""
    codes = torch.tensor(list(gzip.decompress(DATA.read_bytes())))
    split = len(codes) * 9 // 10
    windows = (codes[split:] if held_out else codes[:split]).unfold(0, LENGTH + 1, LENGTH)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


class CharacterLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.head(states)


def next_character(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def job() -> plait.Job:
    return plait.Job(
        model=CharacterLSTM,
        data=text,
        loss=next_character,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
        clip_norm=1.0,
        batch=32,
        steps=300,
        evaluate=lambda: text(held_out=True),
        evaluate_every=150,
    )


if __name__ == "__main__":
    result = plait.train(job(), plan="ddp", ranks=2)
    model = CharacterLSTM()
    model.load_state_dict(result.weights)
    inputs, targets = text(held_out=True).tensors
    with torch.no_grad():
        loss = next_character(model(inputs[:256]), targets[:256]).item()
    print(f"held-out loss: {loss:.3f} nats a character, from {result.losses[0]:.3f}")
