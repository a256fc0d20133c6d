"""Tasks that somebody else started: a run in every task, and models trained apart, are refused."""

from pathlib import Path

import pytest
import torch
from tests.ranks import jobs

import plait
from plait.errors import PlanError, UsageError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "RANK": "0", "WORLD_SIZE": "1"}


def put(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN, MPIRUN])
def test_a_run_in_every_task_is_refused(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(environment, monkeypatch)
    with pytest.raises(
        UsageError, match="started 4 tasks, and each of them would start a whole run"
    ) as caught:
        plait.train(jobs.plain(), "ddp", 2, out=tmp_path / "run")
    assert caught.value.fix is not None and "--ranks 4" in caught.value.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("environment", [BATCH_SCRIPT, ONE_TASK])
def test_one_task_may_train(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(environment, monkeypatch)
    assert len(plait.train(jobs.plain(), "single", steps=1, out=tmp_path / "run").losses) == 1


@pytest.mark.parametrize("environment", [SRUN, MPIRUN])
def test_tasks_that_cannot_find_each_other_are_refused(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(environment, monkeypatch)
    with pytest.raises(UsageError, match="each would train a model of its own"):
        plait.parallelize(jobs.plain(), "single")


class Largest(torch.optim.SGD):
    """Divides by the largest gradient of the tensor: an update of a part is another one."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad / parameter.grad.abs().max()


def test_a_loop_of_ones_own_is_checked_like_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    put({"RANK": "0", "WORLD_SIZE": "2"}, monkeypatch)
    job = jobs.plain()
    given = plait.Job(
        model=job.model, data=job.data, loss=job.loss, batch=job.batch, optimizer=lambda p: Largest(p, lr=0.1)
    )
    with pytest.raises(PlanError, match="Largest cannot update parts"):
        plait.parallelize(given, "zero1")
    with pytest.raises(PlanError, match="does not fit"):
        plait.parallelize(job, "ddp", memory="1KiB")
