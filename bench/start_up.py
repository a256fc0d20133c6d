"""From process start to the first step done, for a small MLP: this file is both plait's job and the script for
torchrun.

plait run bench/start_up.py:job --plan ddp --ranks 2 --steps 1 torchrun --standalone --nproc-per-node 2
bench/start_up.py MARK (touches the file MARK after the first step)
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import plait


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 64, generator=generator)
    return list(zip(x, torch.randint(10, (512,), generator=generator), strict=True))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def job() -> plait.Job:
    return plait.Job(model=model, data=data, loss=nn.CrossEntropyLoss(), optimizer=sgd, batch=64, steps=1)


def main(mark: Path) -> None:
    """The same step in a script as torch's tutorials write it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = data()
    wrapped = DistributedDataParallel(model())
    optimizer = sgd(list(wrapped.parameters()))
    sampler: DistributedSampler = DistributedSampler(samples)  # type: ignore[arg-type]
    x, y = next(iter(DataLoader(samples, batch_size=32, sampler=sampler)))  # type: ignore[arg-type]
    nn.CrossEntropyLoss()(wrapped(x), y).backward()
    optimizer.step()
    if dist.get_rank() == 0:
        mark.touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
