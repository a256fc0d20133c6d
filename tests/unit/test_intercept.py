"""Ops that Python takes over: all of them, in threads of autograd too, and nothing else."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.torch_private.dispatch import TorchDispatchMode
from plait.torch_private.intercept import drawing_ops, intercepted


class Seen(TorchDispatchMode):
    """What draws, as a mode sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def taken_by(work: Callable[[], Any]) -> list[str]:
    names: list[str] = []

    def take(op: Any, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        names.append(op._schema.name)
        return call()

    with intercepted(((drawing_ops(), take),)):
        work()
    return names


X = torch.rand(4, 4) + 0.1
DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "randn out": lambda: torch.randn(3, out=torch.empty(3)),
    "randint": lambda: torch.randint(5, (3,)),
    "randperm": lambda: torch.randperm(5),
    "normal": lambda: torch.normal(X, 1.0),
    "like": lambda: torch.rand_like(X),
    "in place": lambda: X.clone().log_normal_(),
    "multinomial": lambda: torch.multinomial(X, 2),
    "poisson": lambda: torch.poisson(X),
    "gamma": lambda: torch.distributions.Gamma(X, X).sample(),
    "rrelu": lambda: nn.functional.rrelu(X, training=True),
    "dropout": lambda: nn.functional.alpha_dropout(X, training=True),
    "attention": lambda: nn.functional.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.3),
    "lstm": lambda: nn.LSTM(4, 4, 2, dropout=0.5)(X),
    "scripted": lambda: torch.jit.script(nn.Dropout())(X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(DRAWS))
def test_every_draw_is_taken_that_a_mode_would_see(name: str) -> None:
    torch.manual_seed(0)
    with Seen() as mode:
        DRAWS[name]()
    taken = taken_by(DRAWS[name])
    assert mode.names and len(taken) >= len(mode.names) > 0
    assert taken_by(lambda: X @ X + X.sort().values) == []


def test_what_is_computed_again_in_the_backward_is_seen() -> None:
    x = X.clone().requires_grad_()

    def again() -> None:
        checkpoint(nn.functional.dropout, x, use_reentrant=False).sum().backward()

    assert len(taken_by(again)) == 2


def test_a_compiled_part_runs_as_it_was_written_and_is_compiled_again_after() -> None:
    compiled = list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    part = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), backend=backend, fullgraph=True)
    assert len(taken_by(lambda: taken_by(lambda: part(X)))) == 0  # the inner one has them
    assert len(taken_by(lambda: part(X))) == 1
    assert not compiled
    part(X)
    assert compiled


def test_shapes_alone_are_not_taken() -> None:
    assert taken_by(lambda: torch.empty(3, device="meta").uniform_()) == []


def test_a_taker_gives_the_result_and_its_own_ops_are_torchs() -> None:
    def take(op: Any, given: Mapping[str, Any], call: Callable[[], Tensor]) -> Tensor:
        return torch.rand(given["size"]) + 7.0

    with intercepted(((drawing_ops(), take),)):
        made = torch.rand(3)
    assert made.ge(7.0).all() and torch.rand(3).lt(1.0).all()


def test_takers_are_held_for_as_long_as_they_take() -> None:
    """Torch 2.11 counts no reference of its own to what it keeps by thread; later ones do."""

    def take(op: Any, given: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    before = sys.getrefcount(take)
    for _ in range(50):
        with intercepted(((drawing_ops(), take),)), intercepted(((drawing_ops(), take),)):
            others = [(object(), number) for number in range(50)]  # would lie where takers were
            torch.rand(3)
            assert sys.getrefcount(take) > before and len(others) == 50
    assert sys.getrefcount(take) == before
