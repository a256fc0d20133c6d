"""What tests that start processes have in common: graphs, and what is checked afterwards."""

from collections.abc import Iterator

import pytest
from tests.ranks import jobs
from tests.ranks.captured import SHARED


@pytest.fixture(autouse=True)
def _graphs_are_shared(request: pytest.FixtureRequest) -> Iterator[None]:
    """But where a test patches something, which may change what is captured."""
    SHARED.is_used = "monkeypatch" not in request.fixturenames
    yield
    SHARED.is_used = False


@pytest.fixture
def leaves_no_process() -> Iterator[None]:
    """Whoever a test started is gone when it ends."""
    before = jobs.children()
    yield
    assert jobs.children() <= before
