"""Replicas on threads of this process compute what one process does, save, go on and fail like any plan."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from tests.unit.run.test_objectives import gan
from tests.unit.run.test_varying_shapes import job_of as varying
from tests.unit.run.training import case_job, uncapturable_job
from torch import Tensor, nn

import plait
from plait.errors import PlaitError, PlanError
from plait.job.job import Job
from plait.options import Limits
from plait.report.record import read_run
from plait.run.verify import verify

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("plait-replica")]


@pytest.mark.parametrize(
    "job",
    [
        replace(case_job("mlp", torch.float64, batch=5, steps=3), accumulate=2, clip_norm=0.1),
        case_job("small_batch_norm", torch.float64, steps=3),
        jobs.dropout(),
    ],
    ids=["uneven", "batch norm", "dropout"],
)
def test_it_computes_what_one_process_does(job: Job) -> None:
    for serial in (True, False):
        found = verify(job, "threads", 3, steps=3, serial=serial)
        assert found.ok, (serial, found.first)


def test_a_run_is_told_traced_saved_and_gone_on_with(tmp_path: Path) -> None:
    job, folder = jobs.plain(), tmp_path / "run"
    before = torch.get_num_threads()
    alone = plait.train(job, "single", steps=6, out=tmp_path / "single").losses
    first = plait.train(job, "threads", 2, steps=3, out=folder)
    found = read_run(folder)
    assert found.trace is not None and found.trace.ranks == (0, 1) and "plan: threads" in str(found.plan)
    for rank in (0, 1):
        names = " ".join(span.name for span in found.trace.spans if span.rank == rank)
        assert all(word in names for word in ("scatter", "replicate", "gather losses", "reduce")), names
    then = plait.resume(folder, 3, job=job, plan="threads", steps=5, out=folder)
    last = plait.resume(folder, job=job, plan="single", steps=6, out=folder)
    assert [*first.losses, *then.losses, *last.losses] == pytest.approx(list(alone), rel=1e-5)
    assert torch.get_num_threads() == before


def test_shapes_that_vary_are_what_one_process_makes_of_them() -> None:
    found = verify(varying("causal", accumulate=2), "threads", 2, steps=2)
    assert found.ok, found.first


def test_objectives_in_turn_and_averaged_weights_are_those_of_one_process(tmp_path: Path) -> None:
    exact = plait.Trial(dtype="float64")
    one = plait.train(gan(), "single", out=tmp_path / "one", trial=exact)
    two = plait.train(gan(), "threads", 2, out=tmp_path / "two", trial=exact)
    assert two.losses == pytest.approx(one.losses, rel=1e-9)
    assert one.averaged and two.averaged.keys() == one.averaged.keys()
    for wanted, found in ((one.weights, two.weights), (one.averaged, two.averaged)):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


class _Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.sqrt())


def test_a_replica_that_fails_is_named_and_ends_all(tmp_path: Path) -> None:
    samples = [(torch.full((4,), -1.0 if at == 3 else 1.0), torch.tensor(0)) for at in range(4)]
    job = Job(
        model=_Root, data=samples, loss=nn.CrossEntropyLoss(), batch=4, steps=2, shuffle=False,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    with pytest.raises(PlaitError, match="rank 1"):
        plait.train(job, "threads", 2, out=tmp_path / "run", limits=Limits(detect_nan=True))


def test_a_model_that_runs_eagerly_is_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="replicas that run at once"):
        verify(uncapturable_job(steps=1), "threads", 2, steps=1, serial=True)
