"""Limits of the system that ranks would run into are told before, in words."""

import errno
import os
import resource
from typing import Any

import pytest

from plait.errors import RunError, UsageError
from plait.run.start import launch as launching
from plait.run.start.processes import require_files


def test_too_few_files_are_refused_and_more_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: asked.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (20, 30))
    with pytest.raises(UsageError, match=r"may have 30 files open; with 4 ranks it needs \d+"):
        require_files(4)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (20, 1 << 20))
    require_files(4)
    ((soft, hard),) = asked
    assert 20 < soft < 1000 and hard == 1 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    require_files(4)
    assert len(asked) == 1


def test_a_rank_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_crew(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(launching, "start_crew", start_crew)
    with pytest.raises(RunError, match=r"(?s)rank 0 of 2 cannot be started: .*ulimit -u"):
        launching.launch(lambda seat: None, ranks=2)
