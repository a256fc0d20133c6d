"""Models and losses that keep something from step to step in a place of Python's own, or say what torch draws.

In: a name. Out: a `Job`. Each would be another step when it is captured: it must run eagerly and equal the plain loop.
"""

# mypy: ignore-errors
# Written as people write models, with what a type checker cannot follow.

import itertools
import random
from array import array
from types import SimpleNamespace

import numpy
import torch
import torch.nn.functional as F
from torch import nn

from tests import lasting as this_module
from tests.ordinary import Base, job, mlp

CASES = {}
decay = 1.0
level = torch.ones(6)


def case(model):
    CASES[model.__name__] = lambda: job(model)
    return model


class Scaled(Base):
    """Scaled by something that `factor` changes."""

    def middle(self, h):
        return h * self.factor()


@case
class NumpyGenerator(Scaled):
    def __init__(self):
        super().__init__()
        self.numbers = numpy.random.default_rng(3)

    def factor(self):
        return float(self.numbers.uniform(0.5, 1.5))


@case
class PythonGenerator(Scaled):
    def __init__(self):
        super().__init__()
        self.numbers = random.Random(3)

    def factor(self):
        return self.numbers.random()


@case
class Cycle(Scaled):
    def __init__(self):
        super().__init__()
        self.factors = itertools.cycle([0.5, 1.0, 1.5])

    def factor(self):
        return next(self.factors)


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


@case
class InSlots(Scaled):
    def __init__(self):
        super().__init__()
        self.state = Slots()

    def factor(self):
        self.state.count += 1
        return 1 + self.state.count


@case
class InNumpyArray(Scaled):
    def __init__(self):
        super().__init__()
        self.state = numpy.ones(2)

    def factor(self):
        self.state *= 0.5
        return float(self.state[0])


@case
class InArray(Scaled):
    def __init__(self):
        super().__init__()
        self.state = array("d", [1.0])

    def factor(self):
        self.state[0] *= 0.5
        return self.state[0]


@case
class InNamespace(Scaled):
    def __init__(self):
        super().__init__()
        self.state = SimpleNamespace(decay=1.0)

    def factor(self):
        self.state.decay *= 0.5
        return self.state.decay


@case
class OnFunction(Scaled):
    def __init__(self):
        super().__init__()

        def factor():
            factor.calls += 1
            return 1 + factor.calls

        factor.calls = 0
        self.factor = factor


class Settings:
    decay = 1.0


@case
class OnClass(Scaled):
    def __init__(self):
        super().__init__()
        Settings.decay = 1.0

    def factor(self):
        Settings.decay *= 0.5
        return Settings.decay


@case
class InModule(Scaled):
    def __init__(self):
        super().__init__()
        this_module.decay = 1.0

    def factor(self):
        this_module.decay *= 0.5
        return this_module.decay


@case
class InGlobalTensor(Scaled):
    def __init__(self):
        super().__init__()
        level.fill_(1.0)

    def factor(self):
        before = level.clone()
        level.mul_(0.5)
        return before


@case
class HiddenStatistics(Base):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.BatchNorm1d(6)]

    def middle(self, h):
        return h + self.hidden[0](h).detach() + self.hidden[0].running_mean.sum()


@case
class SeedsItself(Scaled):
    def factor(self):
        torch.manual_seed(0)
        return torch.randn(6)


@case
class TogglesRequiresGrad(Base):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.first.weight.requires_grad_(self.calls % 2 == 0)
        return super().forward(x)


class CountingLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        return F.cross_entropy(output, target) * self.calls


CASES["loss_with_a_buffer"] = lambda: job(mlp, None, CountingLoss())


def teacher_of_the_objective():
    torch.manual_seed(2)
    teacher = mlp()

    def objective(model, batch):
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.3)
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]) + F.mse_loss(output, teacher(batch[0]).detach())

    return job(mlp, objective=objective)


CASES["teacher_of_the_objective"] = teacher_of_the_objective


counted = 0


class Counted(Scaled):
    """Nothing is put back by its constructor: looking at the model must leave no trace."""

    def factor(self):
        global counted
        counted += 1
        return 0.5**counted


def counted_by_the_module():
    global counted
    counted = 0
    return job(Counted)


CASES["Counted"] = counted_by_the_module
