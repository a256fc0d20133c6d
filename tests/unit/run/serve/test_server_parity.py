"""All workers and servers of a plan in one process: what they compute against one rank, and against plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.ranks import jobs
from torch import nn

from plait.errors import UsageError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.proof.reference import Reference, reference_of
from plait.run.proof.serial_run import run_serially
from plait.run.verify import verify


def without_statistics(**fields: Any) -> Job:
    """What `jobs.dropout` is, without batch norm, in two micro-batches."""
    model = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))  # noqa: E731
    return replace(jobs.dropout(), model=model, accumulate=2, **fields)


@pytest.fixture(scope="module")
def with_batch_norm() -> Reference:
    return reference_of(jobs.dropout(), steps=7)  # the last step has 7 samples


@pytest.fixture(scope="module")
def plain() -> Reference:
    return reference_of(without_statistics(), steps=3)


@pytest.mark.parametrize(
    ("plan", "ranks", "sync"),
    [
        ("server-sync", 9, {}),  # 8 workers have 7 samples in the last step
        ("server-sync", 5, {"servers": 3, "bucket_mib": 0}),
        ("server-async", 2, {}),
        ("server-stale", 3, {"servers": 2, "staleness": 2}),
    ],
)
def test_equal_to_one_process_with_batch_statistics(
    plan: str, ranks: int, sync: dict[str, Any], with_batch_norm: Reference
) -> None:
    found = verify(jobs.dropout(), plan, ranks, settings={"sync": sync}, serial=True, against=with_batch_norm)
    assert found.ok, found.first


@pytest.mark.parametrize(("ranks", "servers"), [(4, 1), (9, 2)])
def test_without_slack_server_stale_is_server_sync(ranks: int, servers: int, plain: Reference) -> None:
    sync = {"staleness": 0, "servers": servers}
    found = verify(
        without_statistics(), "server-stale", ranks, settings={"sync": sync}, serial=True, against=plain
    )
    assert found.ok, found.first


class Nearest(nn.Module):
    """Centers of clusters: distances between all points and centers are no op that a batch can be cut for."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(4, 16))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return torch.cdist(points, self.centers).square().amin(1)


def test_what_every_worker_computes_whole_counts_once() -> None:
    job = replace(jobs.plain(), model=Nearest, loss=lambda squares, _: squares.mean())
    assert (found := verify(job, "server-sync", 4, serial=True)).ok, found.first


@pytest.mark.parametrize("plan", ["server-async", "server-stale"])
def test_what_depends_on_time_is_not_compared(plan: str) -> None:
    with pytest.raises(UsageError, match="depends on which of them comes first"):
        verify(jobs.plain(), plan, 3, serial=True)


def test_asynchronous_gradients_are_one_update_each() -> None:
    rate, steps = 0.1, 2
    job = replace(
        jobs.plain(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate), clip_norm=None
    )
    found = run_serially(job, resolve("server-async", 3), steps, torch.float64)
    model = job.build_model().double()
    order = job.order(64)
    assert order is not None
    data = jobs.samples(64)
    for step in range(steps):
        ids = order.at(step).ids.tolist()
        changes = []
        for share in (ids[:8], ids[8:]):  # both were computed on the weights before the step
            x = torch.stack([data[i][0] for i in share]).double()
            y = torch.stack([data[i][1] for i in share])
            changes.append(
                torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
            )
        with torch.no_grad():
            for gradients in changes:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(rate * gradient)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.weights[name], parameter.detach(), rtol=1e-12, atol=1e-12)
