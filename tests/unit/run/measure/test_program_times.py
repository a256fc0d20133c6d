"""Updates too large for the device are timed in part; who is alone compares nothing."""

import pytest
import torch

from plait.job.updates.optimizer_state import Updated
from plait.run.measure import program_times
from plait.run.setup.agreement import check_agreement


def part(name: str, *shape: int) -> Updated:
    return Updated(name=name, shape=shape, dtype=torch.float32)


@pytest.mark.parametrize(
    ("most", "names", "share"),
    [(100, "abc", 1.0), (14, "ab", 14 / 20), (13, "a", 0.4), (1, "a", 0.4)],
)
def test_of_many_elements_the_first_are_timed(
    most: int, names: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_times, "_MOST_UPDATED", most)
    timed, found = program_times._first([part("a", 2, 4), part("b", 6), part("c", 6)])
    assert "".join(updated.name for updated in timed) == names
    assert found == pytest.approx(share)


def test_nothing_to_update_is_all_there_is() -> None:
    assert program_times._first([]) == ([], 1.0)


def test_one_rank_makes_no_digest() -> None:
    """Of 30 GB of weights it would take a minute."""

    def digest() -> str:
        raise AssertionError

    check_agreement("initial weights", digest, 1)
