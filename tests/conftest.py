"""What every test starts from: one thread per process, and the same random numbers each time.

And the order of files: the longest first, so that no worker is left alone with one of them in the end.
"""

import gc
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.distributions import Distribution

from tests.captured import SHARED

LONGEST = (
    "ranks/faults/test_chaos.py", "unit/run/test_parity.py", "unit/run/pipeline/test_pipeline_parity.py",
    "unit/run/within/test_within_parity_hf.py", "ranks/test_launch.py", "ranks/test_examples.py",
    "unit/run/interpret/test_recompute_parity.py", "unit/run/within/test_within_parity.py",
    "unit/run/test_varying_shapes.py", "ranks/plans/test_pipeline.py", "unit/program/place/test_placement_rules.py",
    "ranks/plans/test_within.py", "unit/api/test_api.py", "unit/run/eager/test_against_eager.py",
    "unit/run/within/test_within_parity_conv.py", "ranks/plans/test_averaging.py",
)  # fmt: skip
"""Files of half a minute and more, the longest first. One that is missing here is run later, nothing else."""


SHARING = ("tests/ranks/", "tests/unit/run/", "tests/unit/program/")
"""Folders whose tests share graphs: those of captures themselves do not."""
NOT_SHARING = ("tests/unit/run/eager/",)
"""What capture makes of code that is unlike any other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order (`--no-loadscope-reorder`: else those with the fewest tests are the last)."""
    turn = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.nodeid.partition("::")[0].removeprefix("tests/"), len(turn)))


def pytest_collection_finish() -> None:
    """What was imported stays: nobody need look through it for garbage, nor through graphs every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    Distribution.set_default_validate_args(__debug__)  # torch.compile switches its checks off for the process


@pytest.fixture(autouse=True)
def _grad_mode_is_left_alone() -> Iterator[None]:
    """A test (or the code under it) that leaves gradients switched off would break whatever runs after it."""
    yield
    assert torch.is_grad_enabled(), "gradients were left switched off"


@pytest.fixture(autouse=True)
def _graphs_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """But where a test patches something, which may change what is captured."""
    node = request.node.nodeid
    shares = node.startswith(SHARING) and not node.startswith(NOT_SHARING)
    SHARED.is_used = shares and "monkeypatch" not in request.fixturenames
    yield
    SHARED.is_used = False
