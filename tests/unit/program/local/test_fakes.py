"""Each op is asked of torch once for tensors of the same kind, and again for others."""

from typing import Any

import pytest
import torch
from torch import fx

from plait.program.local.fakes import Fakes
from plait.torch_private.fake import FakeTensorMode

MODE = FakeTensorMode(allow_non_fake_inputs=True)


class Counted:
    """An op that counts how often it is run."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return args[0] + 0


def node(value: Any) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta["val"] = value
    return made


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def test_the_same_question_is_asked_once() -> None:
    op, known = Counted(), {}  # type: ignore[var-annotated]
    first = Fakes(MODE, known).of(op, (node(fake(2, 3)), 1), {"a": [2]})
    again = Fakes(MODE, known).of(op, (node(fake(2, 3)), 1), {"a": [2]})
    assert op.runs == 1 and first is again
    assert first.shape == (2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((node(fake(3, 2)), 1), {}),
        ((node(fake(3, 2).t()), 1), {}),
        ((node(fake(4, 3)[:2]), 1), {}),
        ((node(fake(2, 3, dtype=torch.int32)), 1), {}),
        ((node(fake(2, 3)), 1.0), {}),
        ((node(fake(2, 3)), True), {}),
        ((node(fake(2, 3)), 1), {"a": 1}),
        ((node(fake(2, 3)), (1,)), {}),
    ],
)
def test_another_question_is_asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    op = Counted()
    fakes = Fakes(MODE, {})
    fakes.of(op, (node(fake(2, 3)), 1), {})
    fakes.of(op, args, kwargs)
    assert op.runs == 2


def test_numbers_are_never_taken_for_others() -> None:
    """What comes out of a real tensor may depend on its numbers."""
    op, known = Counted(), {}  # type: ignore[var-annotated]
    for value in (1, 2):
        Fakes(MODE, known).of(op, (node(torch.tensor(value)),), {})
    assert op.runs == 2 and not known
