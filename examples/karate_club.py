"""A graph network on Zachary's karate club: with whom does a member side when the club splits?

A sample is one member: the graph of those around them, two steps far, which is another one for everybody. Vertices of a
round are one call, whatever members they belong to. Half of the members train; the others are known to the network as
friends of those alone.

    plait run examples/karate_club.py --plan ddp --ranks 2

Of the held-out members it tells the side of 0.82; the larger side has half of all members.
"""

from typing import Any

import networkx  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn

import plait

CLUB = networkx.karate_club_graph()
SIDES = ("Mr. Hi", "Officer")
Sample = tuple[Any, int]


def around(member: int, rounds: int) -> Any:
    """What a member hears of in so many rounds, as nested tuples: themselves first, then each friend."""
    if not rounds:
        return member
    return (around(member, rounds - 1), *(around(friend, rounds - 1) for friend in CLUB.neighbors(member)))


class Round(nn.Module):
    """One round at one member (GraphSAGE's mean: Hamilton et al., NeurIPS 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.members = nn.Embedding(len(CLUB), width)
        self.own, self.friends = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, member: Tensor | None, states: Tensor) -> Tensor:
        if member is not None:
            return self.members(member)
        return torch.tanh(self.own(states[0]) + self.friends(states[1:].mean(0)))


class ClubModel(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.rounds = plait.Vertices(Round(width), state=width)
        self.out = nn.Linear(width, len(SIDES))

    def forward(self, members: list[Any]) -> Tensor:
        return self.out(self.rounds(members).roots)


def members(*, held_out: bool) -> list[Sample]:
    """Every other member is held out."""
    return [
        (around(member, 2), SIDES.index(CLUB.nodes[member]["club"]))
        for member in CLUB
        if (member % 2 == 1) == held_out
    ]


def together(samples: list[Sample]) -> tuple[list[Any], Tensor]:
    """Graphs stay what they are; torch's own way would take nested tuples apart."""
    return [graph for graph, _ in samples], torch.tensor([side for _, side in samples])


def size(graph: Any) -> int:
    return 1 + sum(map(size, graph)) if isinstance(graph, tuple) else 1


def accuracy(scores: Tensor, sides: Tensor) -> Tensor:
    return (scores.argmax(1) == sides).float().mean()


def job() -> plait.Job:
    torch.manual_seed(0)
    data = members(held_out=False)
    return plait.Job(
        model=ClubModel(),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=1e-3),
        batch=len(data),
        steps=60,
        collate=together,
        work=[size(graph) for graph, _ in data],
        evaluate=members(held_out=True),
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = plait.train(job(), "ddp", 2)
    print(f"held-out accuracy: {result.evaluation['accuracy']:.3f}")
