"""Ranks are started wherever Python may be: also by a worker of a pool."""

from multiprocessing.process import BaseProcess

import pytest

from plait.run.start.processes import choose_start


def test_a_worker_of_a_pool_starts_fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which multiprocessing lets have no forks, as they might outlive it; ranks do not."""
    assert choose_start("auto", 1) == "fork"
    monkeypatch.setattr(BaseProcess, "daemon", True)
    assert choose_start("auto", 1) == "spawn"
