"""Static or dynamic: what one graph serves, and why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.graphs import captured
from plait.graph.capture import probe


class Doubles(nn.Module):
    """Goes on until a value is large: how often is known when it is."""

    def __init__(self, enough: float) -> None:
        super().__init__()
        self.layer, self.enough = nn.Linear(4, 4), enough

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        while float(x.abs().sum()) < self.enough:
            x = 2 * x
        return x


class DoublesFirst(Doubles):
    """The same, before anything else."""

    def forward(self, x: Tensor) -> Tensor:
        while float(x.abs().sum()) < self.enough:
            x = 2 * x
        return self.layer(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.yes(x) if x.sum() > 0 else self.no(x)


def job(model: Callable[[], nn.Module], data: Any, **more: Any) -> plait.Job:
    return plait.Job(
        model=model,
        data=data,
        loss=lambda output, *_: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=2,
        **more,
    )


FLAT = [(torch.ones(4), torch.tensor(0)) for _ in range(4)]


def test_a_plain_network_is_static() -> None:
    found = plait.verdict(job(lambda: nn.Linear(4, 4), FLAT))
    assert found.kind == "static" and found.fix == "" and "serves every step" in found.line()


def test_samples_of_several_lengths_are_static_for_each_shape() -> None:
    data = [(torch.ones(3 + at, 4), torch.tensor(0)) for at in range(4)]

    def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True), torch.zeros(len(samples))

    found = plait.verdict(job(lambda: nn.Linear(4, 4), data, collate=pad))
    assert found.kind == "static for each shape" and "3x4" in found.why and "6x4" in found.why


def test_all_outcomes_of_a_branch_are_in_one_graph() -> None:
    found = plait.verdict(job(Branches, FLAT))
    assert found.kind == "static" and "all outcomes of its branches" in found.why


def test_a_loop_on_values_is_named_by_its_line() -> None:
    found = plait.verdict(job(lambda: DoublesFirst(100.0), FLAT))
    assert found.kind == "dynamic" and "test_verdict.py:" in found.line() and found.fix


def test_a_module_that_needs_values_may_be_an_island(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lambda enough: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Doubles(enough), nn.Linear(4, 4))  # noqa: E731
    assert plait.verdict(job(lambda: model(-1.0), FLAT)).kind == "static in parts"
    monkeypatch.setattr(probe, "PROBE_S", 0.2)
    endless = lambda: nn.Sequential(DoublesFirst(100.0), nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
    assert plait.verdict(job(endless, FLAT)).kind == "dynamic"  # on zeros it would never end


def test_objects_are_dynamic_and_the_way_out_is_said() -> None:
    class Counts(nn.Linear):
        def forward(self, trees: Any) -> Tensor:
            return torch.stack(
                [super(Counts, self).forward(torch.full((4,), float(len(str(tree))))) for tree in trees]
            )

    trees = [((1, (2, 3)), 0), (((4, 5), 6), 0)]
    given = job(lambda: Counts(4, 4), trees, collate=lambda samples: ([tree for tree, _ in samples], 0))
    found = plait.verdict(given)
    assert found.kind == "dynamic" and "plait.Batched" in found.fix


def test_what_runs_samples_together_already_is_told_so() -> None:
    class Trees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tree = plait.Batched(nn.Linear(4, 4))

        def forward(self, samples: list[Any]) -> Tensor:
            return self.tree([sample.x for sample in samples])

    class Sample:
        x = torch.ones(4)

    trees = job(Trees, [(Sample(),) for _ in range(4)])
    found = plait.verdict(trees)
    assert (
        found.kind == "dynamic"
        and "tree is plait.Batched" in found.why
        and found.fix.startswith("Nothing has")
    )
    with pytest.raises(plait.PlaitError, match="tree is plait.Batched"):
        captured(trees)
