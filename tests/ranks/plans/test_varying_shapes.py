"""Shares padded to different lengths, in real processes."""

import pytest
from tests.unit.run.test_varying_shapes import job_of

from plait.run.verify import verify

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(("plan", "accumulate"), [("zero3", 1), ("1f1b", 3)])
def test_processes_compute_what_one_does(plan: str, accumulate: int) -> None:
    found = verify(job_of("causal", accumulate=accumulate), plan, 2, steps=2)
    assert found.ok, found.first
