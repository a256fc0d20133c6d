"""A thread begins, or there is an error: nobody waits for one that died before it could begin."""

import sys
import threading
import time

import pytest

from plait import threads
from plait.errors import RunError
from plait.threads import TooLongError, at_most, start_thread


def test_a_thread_is_started() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.set)
    start_thread(thread)
    thread.join()
    assert done.is_set()


class _Stillborn(threading.Thread):
    """As one whose process has no memory: made, and dead before its first line."""

    def _bootstrap(self) -> None:
        return


def test_a_thread_that_dies_before_it_begins_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LOOK_S", 0.01)
    with pytest.raises(RunError, match="did not begin: this process has no memory left"):
        start_thread(_Stillborn())


def test_a_thread_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    monkeypatch.setattr(threading, name, refuse)
    with pytest.raises(RunError, match="no thread could be started"):
        start_thread(threading.Thread())


def compute_for_ever() -> None:
    while True:
        pass


def wait_for_ever() -> None:
    while True:
        time.sleep(0.001)


def test_code_is_left_by_its_own_time_not_by_the_clocks() -> None:
    """A busy machine makes everything take longer: that decides nothing."""
    with at_most(0.3):
        time.sleep(0.5)
    with pytest.raises(TooLongError, match=r"0\.1 s"), at_most(0.1):
        compute_for_ever()


def test_code_that_waits_for_ever_is_left_too() -> None:
    with pytest.raises(TooLongError), at_most(0.01):
        wait_for_ever()


def test_nothing_is_left_that_would_stop_a_tracer() -> None:
    """CPython 3.11 never leaves the first line of a traced function while an exception is said to be on its way."""
    with at_most(60):
        pass
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert list(filter(None, [])) == []
        (lambda: None)()
    finally:
        sys.settrace(before)
