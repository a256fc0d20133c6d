"""What every test starts from: one thread per process, and the same random numbers each time."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _grad_mode_is_left_alone() -> Iterator[None]:
    """A test (or the code under it) that leaves gradients switched off would break whatever runs after it."""
    yield
    assert torch.is_grad_enabled(), "gradients were left switched off"
