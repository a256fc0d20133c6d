"""A command whose process is given no more memory says so in a line, however the system told it."""

import os
from errno import ENOMEM, ENOSPC

import pytest

from plait.cli import main


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(ENOMEM, os.strerror(ENOMEM)),
        SystemError("error return without exception set"),  # CPython, which lost the error that it had
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_memory_is_told(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**given: object) -> None:
        raise error

    monkeypatch.setattr(main, "app", fail)
    assert main.call(["run", "job.py"]) == 1
    told = capsys.readouterr().err
    assert "no more memory" in told
    assert "Fix: leave it more memory" in told


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**given: object) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        main.call(["run", "job.py"])


def test_a_full_disk_under_what_is_printed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**given: object) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(main, "app", fail)
    assert main.call(["plan", "--json"]) == 1
    assert "what is printed cannot be written: No space left on device" in capsys.readouterr().err
