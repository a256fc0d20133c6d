"""What tasks on hosts of somebody else's cluster gave."""

import cloudpickle
import pytest

from plait.errors import RunError
from plait.run.engines.host import Ended, values_of


def test_values_by_rank_or_the_first_cause() -> None:
    right = Ended(task=0, code=0, said="", value=cloudpickle.dumps(3))
    assert values_of([right, right]) == [3, 3]
    follows = Ended(task=0, code=1, said="ConnectionError: rank 1 is lost", value=None)
    causes = Ended(task=1, code=1, said="ValueError: by itself", value=None)
    with pytest.raises(RunError, match="rank 1 ended with exit status 1:\nValueError: by itself"):
        values_of([follows, causes])
    with pytest.raises(RunError, match="rank 0 ended"):
        values_of([follows, right])
