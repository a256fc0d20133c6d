"""Models that name devices: the line is told, never a traceback, and the process lives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.ranks import jobs
from torch import Tensor, nn

import plait
from plait.errors import CaptureError, JobError
from plait.graph.from_job import Captures
from plait.job.origin import fix_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to("cuda:1"),
    "to_device": lambda x: x.to(torch.device("cuda", 1)),
    "to_keyword": lambda x: x.to(device="cuda:1"),
    "cuda": lambda x: x.cuda(),
    "cuda_number": lambda x: x.cuda(1),
    "made_there": lambda x: x + torch.zeros(1, device="cuda:1"),
}


class Moves(nn.Module):
    def __init__(self, move: str) -> None:
        super().__init__()
        self.inner = jobs.network()
        self.move = MOVES[move]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(self.move(x))
        return result


def job_of(model: Callable[[], nn.Module]) -> plait.Job:
    plain = jobs.plain()
    return plait.Job(
        model=model, data=plain.data, loss=plain.loss, optimizer=plain.optimizer, batch=plain.batch, steps=1
    )


@pytest.mark.parametrize("move", MOVES)
def test_a_forward_that_moves_its_tensors(move: str, tmp_path: Path) -> None:
    job = job_of(lambda: Moves(move))
    with pytest.raises(
        CaptureError, match=r"test_devices_in_models.py:\d+ .*names the device cuda"
    ) as caught:
        Captures(job).of_size(4)
    assert caught.value.fix is not None and "--device" in caught.value.fix
    with pytest.raises(JobError, match=r"test_devices_in_models.py:\d+") as failed:
        plait.train(job, "single", out=tmp_path / "run")
    assert failed.value.fix is not None and "--device" in failed.value.fix


def test_a_factory_that_moves_its_model(tmp_path: Path) -> None:
    job = job_of(lambda: jobs.network().to("cuda:1"))
    with pytest.raises(JobError, match=r"model\(\) failed at .*test_devices_in_models.py:\d+") as failed:
        plait.train(job, "single", out=tmp_path / "run")
    assert failed.value.fix is not None and "--device" in failed.value.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "text",
    [
        "Torch not compiled with CUDA enabled",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        "CUDA error: invalid device ordinal",
    ],
)
def test_every_way_in_which_torch_says_that_there_is_none(text: str) -> None:
    """Builds of torch for GPUs say it otherwise than those for processors."""
    assert "--device" in fix_of(RuntimeError(text))
