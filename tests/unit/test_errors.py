"""Every error a user can see has one root, says what is wrong and what to do."""

import inspect

import pytest

from plait import errors
from plait.errors import CaptureError, DataError, HangError, JobError, PlaitError, RunError, WorkerError

ALL = [entry for _, entry in inspect.getmembers(errors, inspect.isclass) if issubclass(entry, Exception)]


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_one_root_and_a_line_in_the_tree(error: type[Exception]) -> None:
    assert issubclass(error, PlaitError)
    assert error.__name__ in (errors.__doc__ or "")


def test_a_message_says_what_and_then_the_fix() -> None:
    error = PlaitError("the mesh needs 6 devices; the cluster has 8.", fix="set data=4.")
    assert str(error) == "the mesh needs 6 devices; the cluster has 8.\nFix: set data=4."
    assert error.what == "the mesh needs 6 devices; the cluster has 8."
    assert str(PlaitError("all is lost.")) == "all is lost."


def test_errors_carry_what_the_reader_needs() -> None:
    assert CaptureError("no.", where="job.py:3").where == "job.py:3"
    worker = WorkerError("rank 1 died.", rank=1, traceback="Traceback ...")
    assert (worker.rank, worker.traceback, worker.fix) == (1, "Traceback ...", None)
    hang = HangError("all wait.", waiting=(0, 2), missing=(1,), fix="look at rank 1.")
    assert (hang.waiting, hang.missing) == ((0, 2), (1,))
    assert isinstance(hang, RunError)
    assert issubclass(DataError, JobError)
