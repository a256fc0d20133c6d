"""Groups of options: an invalid one cannot be built."""

from collections.abc import Callable

import pytest

from plait.errors import UsageError
from plait.options import Limits, Saving, Search

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no steps": (lambda: Saving(checkpoint_every=0), "checkpoint_every=0 is not a number of steps"),
    "no patience": (lambda: Limits(hang_s=0), "hang_s=0 is not a time"),
    "no devices": (lambda: Search(ranks=0), "--ranks 0"),
    "nothing to show": (lambda: Search(top=0), "leaves nothing to show"),
    "no time": (lambda: Search(seconds=0), "leaves nothing to show"),
    "paid for using it": (lambda: Search(price=-1.0), "is negative"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_cannot_be_built(name: str) -> None:
    make, told = WRONG[name]
    with pytest.raises(UsageError, match=told):
        make()
