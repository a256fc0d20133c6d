"""Two networks in turn: a critic and a generator that learns to write digits (WGAN with a gradient penalty).

    plait run examples/digits_gan.py --plan ddp --ranks 2
    python examples/digits_gan.py

Four steps of the critic, then one of the generator, each on images and noise of its own. After a few seconds the mean
of its digits is near that of real ones that it has not seen; evaluated is a moving average of the weights.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import plait

DATA = Path(__file__).parent / "data" / "digits.npz"
NOISE = 16


def digits(*, held_out: bool = False) -> Tensor:
    """Images of 8 x 8 pixels, as rows; every fifth is held out."""
    with np.load(DATA) as file:
        images = torch.from_numpy(file["images"]).flatten(1) / 16
    return images[(torch.arange(len(images)) % 5 == 4) == held_out]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def write(model: Gan, count: int) -> Tensor:
    return model.generator(torch.randn(count, NOISE))


def critic_loss(model: Gan, real: Tensor) -> Tensor:
    """How little the critic tells real digits from others, and the penalty that keeps its slope near 1."""
    fake = write(model, len(real)).detach()
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_(True)
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model.critic(fake).mean() - model.critic(real).mean() + 10 * penalty


def generator_loss(model: Gan, real: Tensor) -> Tensor:
    return -model.critic(write(model, len(real))).mean()


def gap(model: Gan, real: Tensor) -> Tensor:
    """How far the mean of as many generated digits is from that of real ones, by pixel."""
    return (write(model, len(real)).mean(0) - real.mean(0)).abs().mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.9))


def job() -> plait.Job:
    return plait.Job(
        model=Gan,
        data=digits,
        objectives=[
            plait.Objective(name="critic", objective=critic_loss, trains="critic", optimizer=adam, repeat=4),
            plait.Objective(name="generator", objective=generator_loss, trains="generator", optimizer=adam),
        ],
        average=plait.Average(decay=0.9),
        batch=64,
        steps=400,
        evaluate=lambda: digits(held_out=True),
        evaluate_every=200,
        metrics={"gap": gap},
    )


if __name__ == "__main__":
    real = digits(held_out=True)
    with torch.no_grad():
        print(f"gap between mean digits before: {gap(Gan(), real).item():.3f}")
    result = plait.train(job(), plan="ddp", ranks=2)
    print(f"after: {result.evaluation['gap']:.3f}")
    model = Gan()
    model.load_state_dict(result.averaged)
    with torch.no_grad():
        for row in write(model, 1).view(8, 8):
            print("".join(" .:-=+*#@"[int(pixel * 8)] for pixel in row))
