"""Models whose first forward fills what later ones read, or converts what is converted already.

In: a name. Out: a `Job`. `CAPTURED` are the same step every time, whatever came before: a graph serves them. `EAGER`
are not.
"""

# mypy: ignore-errors
# Written as people write models, with what a type checker cannot follow.

import functools

import torch
from torch import nn

from tests.ordinary import Base, job

CAPTURED, EAGER = {}, {}


def captured(model):
    CAPTURED[model.__name__] = lambda: job(model)
    return model


def eager(model):
    EAGER[model.__name__] = lambda: job(model)
    return model


@captured
class Positions(Base):
    positions = None

    def middle(self, h):
        if self.positions is None:
            self.positions = torch.arange(h.shape[1], dtype=h.dtype) / h.shape[1]
        return (h + self.positions).tanh()


@captured
class FilledInPlace(Base):
    mask = None

    def middle(self, h):
        if self.mask is None or self.mask.shape[0] != h.shape[1]:
            self.mask = torch.zeros(h.shape[1], h.shape[1])
            self.mask[0] = 1
            self.mask[1:, :2].fill_(0.5)
        return h @ self.mask


@captured
class CachedByShape(Base):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def middle(self, h):
        if h.shape not in self.tables:
            self.tables[h.shape] = torch.linspace(0, 1, h.shape[0])[:, None]
        return h * self.tables[h.shape]


@captured
class CachedFunction(Base):
    @functools.cached_property
    def table(self):
        return torch.eye(6).flip(0)

    def middle(self, h):
        return h @ self.table


@captured
class NumbersOfTheFirst(Base):
    scale = None

    def middle(self, h):
        if self.scale is None:
            self.scale = h.shape[-1] ** -0.5
        return (h * self.scale).tanh()


@captured
class Converts(Base):
    def forward(self, x):
        self.first = self.first.to(torch.float32)
        return self.last.to(x.dtype).float()(self.middle(self.first(x)))


@captured
class MakesALayerAnew(Base):
    """As BigBird does for short sequences: the layers that are made are given the weights of those that were there."""

    kind = "sparse"

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6))

    def middle(self, h):
        if self.kind == "sparse":
            made = nn.Sequential(nn.Linear(6, 6))
            made[0] = self.inner[0]
            self.inner, self.kind = made, "full"
        return self.inner(h).tanh()


@eager
class ScaledByTheFirst(Base):
    scale = None

    def middle(self, h):
        if self.scale is None:
            self.scale = h.detach().std()
        return h / self.scale


@eager
class CountsInATensor(Base):
    count = None

    def middle(self, h):
        self.count = torch.ones(()) if self.count is None else self.count + 1
        return h * self.count


@eager
class OnceAtTheBeginning(Base):
    warm = None

    def middle(self, h):
        if self.warm is None:
            self.warm = torch.ones(1)
            h = 2 * h
        return h * self.warm


@eager
class WritesToItsTable(Base):
    table = None

    def middle(self, h):
        if self.table is None:
            self.table = torch.ones(6)
        self.table.mul_(1.5)
        return h * self.table


@eager
class ThirdTime(Base):
    a = b = None

    def middle(self, h):
        if self.a is None:
            self.a = torch.ones(1)
        elif self.b is None:
            self.b = torch.ones(1)
        else:
            h = h * 3
        return h.tanh()
