"""Tasks that meet: by which addresses they are reached, and that one of them tells why they do not begin."""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plait.errors import EchoError, PlaitError, UsageError
from plait.run.join.place import Place
from plait.run.start.party import telling
from plait.run.start.tasks import first, follower, members
from plait.run.start.tasks.first import First
from plait.run.start.tasks.follower import Follower

pytestmark = pytest.mark.timeout(60)

_TOKEN = os.urandom(32)  # it names ports, which another test may have meanwhile
_AWAY = "127.0.0.9"
"""As if it were another host's."""


def _place(task: int, tasks: int = 3) -> Place:
    return Place(engine="x", task=task, tasks=tasks, local_tasks=1, first="node0", run="1")


_made: list[Follower] = []


def _follow(task: int) -> Follower:
    _made.append(Follower(_place(task), _TOKEN, {"PLAIT_ADDRESS": _AWAY} if task == 2 else {}, 30.0))
    return _made[-1]


def _beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """What it returns or raises, once its thread has ended."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except PlaitError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Task 0 has two addresses; tasks beside it come by the first, another host by the other."""
    called = {0: ("127.0.0.2", "127.0.0.3"), 1: ("127.0.0.2",), 2: ("127.0.0.3",)}
    for module in (first, follower):
        monkeypatch.setattr(module, "addresses_of_first", lambda place: called[place.task])
    monkeypatch.setattr(members, "is_here", lambda address: address != _AWAY)
    yield
    while _made:
        _made.pop().close()


def test_a_task_beside_the_first_is_reached_as_other_hosts_reach_that() -> None:
    """By the address that it came by itself they may not come."""
    thread, beside = _beside(lambda: _follow(1))
    other, away = _beside(lambda: _follow(2))
    task_0 = First(_place(0), _TOKEN, {}, 30.0)
    thread.join()
    other.join()
    try:
        assert task_0.address[0] == "127.0.0.3"
        assert (beside[0]._secret().host, away[0]._secret().host) == ("127.0.0.3", _AWAY)
        assert beside[0].first == away[0].first == task_0.address
        stores = [task_0.own_store(5.0), beside[0].own_store(5.0)]  # the door that it came by is closed
        stores[0].set("said", b"here")
        assert stores[1].get("said") == b"here"
        for store in stores:
            store.close()
    finally:
        task_0.close()


@pytest.mark.parametrize("late", [False, True])
def test_one_task_tells_why_none_begins(late: bool) -> None:
    """Also to one that comes when task 0 knows already."""
    told: list[threading.Thread] = []

    def wrong() -> None:
        found = _follow(1)
        if not late:
            told.append(_beside_begin())
        found.fail(UsageError("there is no file job.py."))

    others: list[Any] = []

    def _beside_begin() -> threading.Thread:
        thread, found = _beside(lambda: _follow(2).begin({"plan": "ddp"}))
        others.append(found)
        return thread

    thread, failed = _beside(wrong)
    if late:
        timer = threading.Timer(0.5, lambda: told.append(_beside_begin()))
        timer.start()
    with pytest.raises(UsageError, match=r"task 1 on .*: there is no file job\.py\."):
        First(_place(0), _TOKEN, {}, 30.0)
    thread.join()
    told[0].join()
    assert [type(error) for error in (*failed, *others[0])] == [EchoError, EchoError]


def test_an_address_of_another_host_is_told_by_task_0() -> None:
    """One variable for all hosts is easily set."""
    thread, found = _beside(lambda: Follower(_place(1, 2), _TOKEN, {"PLAIT_ADDRESS": "240.0.0.1"}, 30.0))

    def begin() -> None:
        task_0 = First(_place(0, 2), _TOKEN, {}, 30.0)
        try:
            with telling(task_0):
                task_0.begin({"plan": "ddp"}, 30.0)
        finally:
            task_0.close()

    with pytest.raises(
        UsageError, match=r"task 1 on .*: PLAIT_ADDRESS=240\.0\.0\.1 is no address of this host"
    ):
        begin()
    thread.join()
    assert isinstance(found[0], EchoError)


def test_those_that_came_say_nothing_of_those_that_did_not() -> None:
    thread, found = _beside(lambda: _follow(1))
    with pytest.raises(UsageError, match=r"task 2 of 3 did not come within 1 s"):
        First(_place(0), _TOKEN, {}, 1.0)
    thread.join()
    with pytest.raises(EchoError, match="task 2 of 3 did not come"):
        found[0].fail(UsageError("something else"))
