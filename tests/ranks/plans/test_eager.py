"""Models that cannot be captured, on real processes: shares of a batch give what the whole gives in one process."""

import pytest
from tests.unit.run.eager.test_eager_shares import Opaque, job

from plait.run.verify import verify

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("leaves_no_process")]


@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_processes_compute_what_one_does(plan: str) -> None:
    """Five samples in two micro-batches on three ranks: one of them has none of the second."""
    made = job(model=lambda: Opaque(drop=0.3), accumulate=2)
    outcome = verify(made, plan, 3, steps=2)
    assert outcome.first is None, outcome.first
    assert any("running eagerly" in notice for notice in outcome.notices)
