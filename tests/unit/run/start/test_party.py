"""Tasks that did not come."""

from collections.abc import Mapping

import pytest

from plait.errors import UsageError
from plait.run.join.place import Place
from plait.run.start import party
from plait.run.start.tasks.first import First


def test_tasks_that_did_not_come_are_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even to tell them that they did not come."""
    for name, value in {
        "PLAIT_TASKS": "2", "PLAIT_TASK": "0", "PLAIT_FIRST_ADDRESS": "127.0.0.1", "PLAIT_TOKEN": "t" * 32,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(party, "_apart", set())
    tried: list[float] = []

    class NobodyComes(First):
        def __init__(
            self, place: Place, token: bytes, environment: Mapping[str, str], patience_s: float
        ) -> None:
            tried.append(patience_s)
            raise UsageError("task 1 of 2 did not come.")

    monkeypatch.setattr(party, "First", NobodyComes)
    place = party.place_here()
    assert place is not None
    with pytest.raises(UsageError, match="did not come"), party.told_once(), party.told_once():
        party.join(place, 2)
    assert len(tried) == 1
