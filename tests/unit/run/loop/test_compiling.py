"""When compiled segments are used: by all ranks from the same step on, or by none."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from plait.plan.named import resolve
from plait.program.segment import compiled as compiled_module
from plait.program.segment.behind import Behind
from plait.program.segment.compiled import CompiledSegments
from plait.run.loop import compiling
from plait.run.loop.compiling import Compiling


class Rank:
    """One rank whose compiler answers when the test says so."""

    def __init__(self, rank: int, ranks: int, plan: str = "ddp") -> None:
        self.behind = Behind(torch.device("cpu"), 1)
        self.behind.hear = list  # type: ignore[method-assign]
        self.compiled = CompiledSegments(torch.device("cpu"), behind=self.behind)
        self.restarts = 0
        self.notices: list[str] = []
        captured = SimpleNamespace(restart=lambda: setattr(self, "restarts", self.restarts + 1))
        board = SimpleNamespace(enter=lambda *_: None)
        seat: Any = SimpleNamespace(
            rank=rank, ranks=ranks, board=board, emit=lambda e: self.notices.append(e["notice"])
        )
        segments: Any = SimpleNamespace(compiled=self.compiled, captured=captured)
        self.compiling = Compiling(segments, resolve(plan, ranks, {}, None), seat, 0)
        self.used: list[tuple[str, int]] = []

    def want(self, key: str) -> None:
        graph = fx.GraphModule(torch.nn.Module(), fx.Graph())
        wanted = self.behind.want(key, key, graph, [], self.compiled.step)
        wanted.puts.append(lambda function: self.used.append((key, self.compiled.step)))

    def answer(self) -> None:
        self.behind._open.clear()


@pytest.fixture(autouse=True)
def instantly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "compile_graph", lambda *_: lambda args: args)


def march(ranks: list[Rank], step: int, monkeypatch: pytest.MonkeyPatch, step_s: float = 2.0) -> None:
    """The end of a step: what all have to say is known before anybody goes on."""
    said: list[Any] = []

    def stop(value: Any) -> list[Any]:
        said.append(value)
        raise InterruptedError

    for told in (stop, lambda value: said):
        monkeypatch.setattr(compiling, "tell", told)
        for rank in ranks:
            try:
                rank.compiling.after(step, step_s)
            except InterruptedError:
                continue


def test_all_ranks_change_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(number, 2) for number in range(2)]
    for rank in ranks:
        rank.want("first")
    march(ranks, 0, monkeypatch)
    ranks[0].answer()
    march(ranks, 1, monkeypatch)
    assert not ranks[0].used, "the other one is not ready"
    for rank in ranks:
        rank.want("second")  # in step 2
    ranks[1].answer()
    march(ranks, 2, monkeypatch)
    for rank in ranks:
        assert rank.used == [("first", 3)] and rank.compiled.first_step == 3 and rank.restarts == 1
        assert rank.behind.num_waiting == 1, "rank 0 waits for it still, so rank 1 does not use it either"
    ranks[0].answer()
    march(ranks, 3, monkeypatch)
    assert [rank.used[-1] for rank in ranks] == [("second", 4)] * 2
    assert "from step 4 on" in ranks[0].notices[0] and len(ranks[0].notices) == 2 and not ranks[1].notices


def test_where_one_compiler_is_lost_nobody_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Rank(number, 2) for number in range(2)]
    for rank in ranks:
        rank.want("first")
    ranks[0].answer()
    ranks[1].behind.lost = "the process that compiles has ended (status -9)"
    march(ranks, 0, monkeypatch)
    ranks[1].answer()
    march(ranks, 1, monkeypatch)
    assert not any(rank.used for rank in ranks)
    assert ranks[0].notices == [
        "what is not compiled yet runs as written from here on: on rank 1 the process that compiles has ended "
        "(status -9)."
    ]
    assert all(rank.compiled.first_step is None and rank.behind.lost for rank in ranks)


@pytest.mark.parametrize(("wants", "looked"), [(True, [0, 40, 80]), (False, [0])])
def test_short_steps_are_not_held_up_by_looking(
    wants: bool, looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """About once a second while something is waited for, and seldom else."""
    looks: list[int] = []

    def look(step: int, value: Any) -> list[Any]:
        looks.append(step)
        return [value]

    rank = Rank(0, 2)
    if wants:
        rank.want("first")
    for step in range(100):
        monkeypatch.setattr(compiling, "tell", partial(look, step))
        rank.compiling.after(step, 0.025)
    assert looks == looked


def test_workers_with_weights_of_their_own_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "tell", lambda value: pytest.fail("they do not march"))
    rank = Rank(0, 2, "local-sgd")
    rank.want("first")
    rank.answer()
    rank.compiling.after(0, 1.0)
    assert rank.used == [("first", 1)]
