"""Processes that read data, as torch's `get_worker_info()` tells of them."""

from typing import Any

from torch.utils.data._utils import worker


def become_worker(number: int, workers: int, seed: int, dataset: Any) -> None:
    """This process is that one of so many."""
    worker._worker_info = worker.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
