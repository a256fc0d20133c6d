"""Tasks that somebody else started: contradictions are told by the first of them alone, before anything else."""

from pathlib import Path

import pytest
import torch
from tests.ranks import jobs

import plait
from plait.errors import PlanError, UsageError

BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "RANK": "0", "WORLD_SIZE": "1"}


def put(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_task_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put({"PLAIT_TASK": "0", "PLAIT_TASKS": "2", "PLAIT_FIRST_ADDRESS": "127.0.0.1"}, monkeypatch)
    put({"PLAIT_TOKEN": "a token of this test", "PLAIT_JOIN_S": "0.3"}, monkeypatch)
    with pytest.raises(UsageError, match="task 1 of 2 did not come within 0.3 s"):
        plait.train(jobs.plain(), "ddp", out=tmp_path / "run")
    monkeypatch.setenv("PLAIT_TASK", "1")
    with pytest.raises(
        UsageError, match="did not find task 0 at 127.0.0.1 within 0.3 s: nobody listens there"
    ):
        plait.train(jobs.plain(), "ddp", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("environment", [BATCH_SCRIPT, ONE_TASK])
def test_one_task_may_train(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(environment, monkeypatch)
    assert len(plait.train(jobs.plain(), "single", steps=1, out=tmp_path / "run").losses) == 1


class Largest(torch.optim.SGD):
    """Divides by the largest gradient of the tensor: an update of a part is another one."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.abs().max()


def test_a_loop_of_ones_own_is_checked_like_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    put({"RANK": "0", "WORLD_SIZE": "2"}, monkeypatch)
    monkeypatch.setattr("plait.run.parallelize.agree", lambda facts: None)  # there is no other task
    job = jobs.plain()
    given = plait.Job(
        model=job.model, data=job.data, loss=job.loss, batch=job.batch, optimizer=lambda p: Largest(p, lr=0.1)
    )
    with pytest.raises(PlanError, match="Largest cannot update parts"):
        plait.parallelize(given, "megatron")
    with pytest.raises(PlanError, match="does not fit"):
        plait.parallelize(job, "ddp", memory="1KiB")
