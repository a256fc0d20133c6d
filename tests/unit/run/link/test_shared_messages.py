"""Messages through shared memory: what was received is taken back, whenever that happens."""

from plait.run.link.shm.messages import Mail


class ClearedWhileRead(list[int]):
    """A table whose entries a receiver clears right after they were first read."""

    def __getitem__(self, place: int) -> int:  # type: ignore[override]
        value = super().__getitem__(place)
        self[place] = 0
        return value


def test_a_region_that_is_freed_between_two_looks_is_not_lost() -> None:
    mail = Mail.__new__(Mail)
    mail._rank, mail._tables = 0, [ClearedWhileRead([7, 7, 0])]  # type: ignore[list-item]
    mail._under_way, mail._spare = [(0, "a"), (1, "b"), (2, "c")], []  # type: ignore[list-item]
    assert mail._collect() == 1
    assert mail._collect() == 2
    assert sorted(map(str, mail._spare)) == ["a", "b", "c"] and not mail._under_way
