"""Collectives under way on one thread: what waits, what goes on, what is told."""

import pytest

from plait.run.wire.inbox import Done
from plait.run.wire.turns import InTurns, Turns


@pytest.fixture
def group() -> InTurns:
    return InTurns("of a test", (4, 5), timeout_s=5)


def test_a_collective_posts_its_messages_while_another_one_waits(group: InTurns) -> None:
    first, second = Done(), Done()
    posted: list[str] = []

    def turns(name: str, message: "Done") -> Turns:
        posted.append(name)
        yield [(1, message)]
        posted.append(f"{name} is there")

    ends = [group.start("all_reduce", turns("first", first)), group.start("sum", turns("second", second))]
    second.set_result(None)
    ends[1].result(5)
    assert posted == ["first", "second", "second is there"] and not ends[0].done()
    first.set_result(None)
    ends[0].result(5)
    group.close()


def test_who_does_not_come_is_named_and_later_ones_go_on() -> None:
    group = InTurns("of a test", (4, 5), timeout_s=0.1)

    def turns(message: "Done") -> Turns:
        yield [(1, message)]

    late = Done()
    with pytest.raises(ConnectionError, match="all_reduce: rank 5 did not come within 0.1 s: timed out"):
        group.start("all_reduce", turns(late)).result(5)
    late.set_result(None)
    there = Done()
    there.set_result(None)
    group.start("all_reduce", turns(there)).result(5)
    group.close()


def test_an_error_of_a_message_is_told_with_the_operation(group: InTurns) -> None:
    def turns() -> Turns:
        lost = Done()
        lost.set_exception(ConnectionError("the connection to rank 5 is lost."))
        yield [(1, lost)]

    with pytest.raises(ConnectionError, match="broadcast: the connection to rank 5 is lost"):
        group.start("broadcast", turns()).result(5)
    group.close()
