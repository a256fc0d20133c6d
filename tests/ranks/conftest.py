"""What tests that start processes have in common: what is checked afterwards."""

from collections.abc import Iterator

import pytest
from tests.ranks import jobs


@pytest.fixture
def leaves_no_process() -> Iterator[None]:
    """Whoever a test started is gone when it ends."""
    before = jobs.children()
    yield
    assert jobs.children() <= before
