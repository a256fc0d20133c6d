"""`verify` converts the captured graph to float64, not the user's code, which may name dtypes as it likes."""

import pytest
import torch
from torch import Tensor, nn

from plait.errors import StepError
from plait.graph.capture.widen import WITHOUT_FLOAT64
from plait.graph.from_job import Captures
from plait.job.job import Job
from plait.run.verify import verify


@torch.library.custom_op("tests::halve", mutates_args=())
def halve(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise RuntimeError(f"halve is not implemented for {x.dtype}")
    return x / 2


halve.register_fake(torch.empty_like)
halve.register_autograd(lambda ctx, gradient: gradient / 2)


class Particular(nn.Module):
    """Insists on float32, and mixes it with what it makes itself."""

    def __init__(self, op: bool = False, bad: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.op, self.bad = nn.Linear(4, 6), nn.Linear(6, 3), op, bad
        self.register_buffer("scale", torch.full((6,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        h = (self.first(x).float() @ torch.eye(6, dtype=torch.float32)).to(torch.float32) * self.scale
        h = halve(h) if self.op else h
        return self.last(h[:, torch.arange(6) + int(self.bad)])


def job_of(**options: bool) -> Job:
    draw = torch.Generator().manual_seed(0)
    return Job(
        model=lambda: Particular(**options),
        data=(torch.randn(12, 4, generator=draw), torch.arange(12) % 3),
        loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
        steps=2,
    )


def test_the_graph_is_in_float64_throughout() -> None:
    graph = Captures(job_of(), dtype=torch.float64).of_size(4)
    found = {node.meta["val"].dtype for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert found <= {torch.float64, torch.int64, torch.bool}
    outcome = verify(job_of(), "ddp", 2, serial=True, steps=2)
    assert outcome.ok and max(entry.tolerance for entry in outcome.differences) == 1e-9
    assert outcome.eager and any("compared with it in float32" in notice for notice in outcome.notices)


def test_an_op_without_float64_is_named_and_compared_in_float32() -> None:
    before = frozenset(WITHOUT_FLOAT64)
    try:
        outcome = verify(job_of(op=True), "zero3", 2, serial=True, steps=2)
        assert outcome.ok and outcome.eager
        assert any("tests.halve.default cannot be had in float64" in notice for notice in outcome.notices)
        with pytest.raises(StepError, match="index"):
            verify(job_of(bad=True), "ddp", 2, serial=True, steps=2)
        assert WITHOUT_FLOAT64 - before == {"tests.halve.default"}
    finally:
        WITHOUT_FLOAT64.intersection_update(before)


class Counting(nn.Module):
    """Numbers of Python that meet integers have the default dtype; a condition and an index stay what they are."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        late = torch.where(self.count > 1, 0.7, 0.3)
        h: Tensor = self.first(x) * (1 - 0.1 * self.count) / (self.count / 3) + late
        return self.last(h[:, torch.arange(6).flip(0)] * self.count.sqrt())


def test_counts_that_meet_numbers_follow() -> None:
    """The user's own code is then compared in float64, and not in float32 alone."""
    made = torch.Generator().manual_seed(0)
    job = Job(
        model=Counting, data=(torch.randn(12, 4, generator=made), torch.arange(12) % 3), loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch=6, steps=2,
    )  # fmt: skip
    outcome = verify(job, "ddp", 2, serial=True, steps=2)
    assert outcome.ok and max(entry.tolerance for entry in outcome.eager) == 1e-9
    assert not any("compared with it in float32" in notice for notice in outcome.notices)
