"""Several processes that each do one thing after the other, side by side.

In: things to do, and what does one of them. Out: what came of each, as they end. Lanes are forks and inherit all that
was imported. They hear of what is next by pipes: a socket of theirs would be taken for one of the runs that they start.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")
_NO_MORE = None


def side_by_side(
    num_lanes: int,
    make: Callable[[int], AbstractContextManager[Callable[[Item], Found]]],
    items: Iterable[Item],
) -> Iterator[tuple[Item, Found]]:
    """Every item and what came of it; `make` is called in each lane, with its number, and left at its end."""
    fork, left = get_context("fork"), iter(items)
    processes: list[ForkProcess] = []
    under_way: dict[Connection, tuple[Connection, Item]] = {}
    try:
        for number, item in zip(range(num_lanes), left, strict=False):
            (heard, orders), (answers, told) = fork.Pipe(duplex=False), fork.Pipe(duplex=False)
            processes.append(fork.Process(target=_be_a_lane, args=(number, make, heard, told)))
            processes[-1].start()
            heard.close()
            told.close()
            orders.send(item)
            under_way[answers] = (orders, item)
        while under_way:
            for answers in [found for found in wait(list(under_way)) if isinstance(found, Connection)]:
                orders, item = under_way.pop(answers)
                yield item, answers.recv()
                if (following := next(left, _NO_MORE)) is not _NO_MORE:
                    under_way[answers] = (orders, following)
                orders.send(following)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _be_a_lane(
    number: int,
    make: Callable[[int], AbstractContextManager[Callable[[Item], Found]]],
    orders: Connection,
    answers: Connection,
) -> None:
    with make(number) as do:
        while (item := orders.recv()) is not _NO_MORE:
            answers.send(do(item))
