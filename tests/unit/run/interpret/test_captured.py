"""Segments as graphs, on a recorder that computes a function again into the memory of its first results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zoo import ZOO

from plait.run.interpret.captured import CapturedComputes
from plait.run.parallelize import Step, parallelize


class Again:
    """Does what a graph does: computes what it recorded from the same memory into the same memory."""

    def __init__(self, *, fails: bool = False, device_s: float = 0.0) -> None:
        self.fails, self.device_s = fails, device_s
        self.num_recorded = 0
        self.num_replayed = 0

    def time(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        return function(), lambda: self.device_s

    def has_room(self) -> bool:
        return True

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_recorded += 1
        first = function()
        for result in first:
            if isinstance(result, torch.Tensor) and result.is_floating_point() and result.is_contiguous():
                result.fill_(torch.nan)  # a graph that was only recorded has computed nothing

        def replay() -> None:
            self.num_replayed += 1
            for result, new in zip(first, function(), strict=True):
                if isinstance(result, torch.Tensor) and result.data_ptr() != new.data_ptr():
                    result.copy_(new)

        return first, replay


def trained(captured: CapturedComputes | None, name: str, **settings: Any) -> tuple[list[float], Step]:
    job = ZOO[name].job(6, 1, optimizer="adamw", num_samples=24, clip_norm=0.5, **settings)
    step = parallelize(job, "single")
    step._machine.segments.captured = captured
    source = step._programs.captures.source
    batches = [source.fetch(torch.arange(6) + 6 * (n % 4)) for n in range(7)]
    return [step(batch) for batch in batches], step


@pytest.mark.parametrize("name", ["gpt_dropout", "resnet_bn"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_graphs_compute_what_segments_do(name: str, accumulate: int) -> None:
    expected, plain = trained(None, name, accumulate=accumulate)
    again, told = Again(), list[str]()
    losses, step = trained(CapturedComputes(again, "on", told.append), name, accumulate=accumulate)
    assert losses == expected
    assert again.num_recorded >= 2 * accumulate
    assert again.num_replayed == 6 * again.num_recorded
    assert not told
    for left, right in zip(step.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)


def test_auto_captures_where_the_device_waits_for_the_host() -> None:
    again, told = Again(device_s=1e-9), list[str]()
    assert trained(CapturedComputes(again, "auto", told.append), "mlp")[0] == trained(None, "mlp")[0]
    assert again.num_recorded
    assert "run as CUDA graphs" in told[0]
    busy = Again(device_s=100.0)
    trained(CapturedComputes(busy, "auto", told.append), "mlp")
    assert not busy.num_recorded


def test_what_cannot_be_recorded_runs_as_it_did() -> None:
    again, told = Again(fails=True), list[str]()
    losses, _ = trained(CapturedComputes(again, "on", told.append), "gpt_dropout")
    assert losses == trained(None, "gpt_dropout")[0]
    assert len(told) == 1
    assert "cannot be a CUDA graph: operation not permitted" in told[0]


def test_memory_that_moves_is_captured_again_then_given_up() -> None:
    again, told = Again(), list[str]()
    captured = CapturedComputes(again, "on", told.append)
    job = ZOO["mlp"].job(6, 1, num_samples=24)
    step, plain = parallelize(job, "single"), parallelize(job, "single")
    step._machine.segments.captured = captured
    batch = step._programs.captures.source.fetch(torch.arange(6))
    values = step._machine._values
    for number in range(11):
        for value, tensor in list(values.items()):
            if value.kind == "parameter" and number % 2 == 0:
                values[value] = tensor.detach()  # the same memory, another tensor
        assert step(batch) == plain(batch)
    assert (
        again.num_recorded >= 7
    )  # four times, of two segments, the last of which was given up with the first
    assert len(told) == 1
    assert "reads other memory" in told[0]


def test_segments_that_run_another_way_are_captured_again() -> None:
    """What was recorded before is not replayed, and it is decided anew."""
    again, told = Again(device_s=1e-9), list[str]()
    captured = CapturedComputes(again, "auto", told.append)
    job = ZOO["mlp"].job(6, 1, num_samples=24)
    step, plain = parallelize(job, "single"), parallelize(job, "single")
    step._machine.segments.captured = captured
    batch = step._programs.captures.source.fetch(torch.arange(6))
    assert [step(batch) for _ in range(6)] == [plain(batch) for _ in range(6)]
    recorded, replayed = again.num_recorded, again.num_replayed
    assert recorded
    captured.restart()
    assert [step(batch) for _ in range(3)] == [plain(batch) for _ in range(3)]
    assert (again.num_recorded, again.num_replayed) == (recorded, replayed)
    assert [step(batch) for _ in range(3)] == [plain(batch) for _ in range(3)]
    assert again.num_recorded == 2 * recorded and again.num_replayed == replayed + 3 * recorded
    assert len(told) == 2
