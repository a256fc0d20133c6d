"""Ctrl-C that comes just before ranks are watched is one wish, neither lost nor counted twice."""

import signal
import time
from collections.abc import Iterator

import pytest

from plait.run.start.watch.interrupts import Interrupts, raised_in_safety


@pytest.fixture(autouse=True)
def python_listens() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wish_that_has_not_come_out_is_handed_over() -> None:
    with raised_in_safety():
        signal.raise_signal(
            signal.SIGINT
        )  # here, in code that is not plait's, it would be raised in a second
        with Interrupts() as interrupts:
            time.sleep(0.1)
            assert (interrupts.count, interrupts.number) == (1, signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert interrupts.count == 2


def test_who_listens_later_is_told_of_nothing() -> None:
    with raised_in_safety(), Interrupts() as interrupts:
        time.sleep(0.05)
        assert interrupts.count == 0


@raised_in_safety()
def _wait_asked_to_end() -> None:
    signal.raise_signal(signal.SIGINT)
    time.sleep(10)


def test_ctrl_c_is_raised_soon_where_nobody_takes_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        _wait_asked_to_end()
