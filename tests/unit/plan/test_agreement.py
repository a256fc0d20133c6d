"""When workers mix in each other's weights: data, without programs."""

from typing import Any

import pytest

from plait.plan.agreement import every


@pytest.mark.parametrize(
    ("steps", "options", "due"),
    [
        (1, {}, {0: (0,), 1: (0,), 2: (0,)}),
        (3, {}, {2: (0,), 5: (0,)}),
        (4, {"fragments": 2}, {1: (0,), 3: (1,), 5: (0,)}),
        (3, {"warmup": 2}, {0: (0,), 1: (0,), 2: (0,), 5: (0,)}),
        ("epoch", {}, {4: (0,)}),
    ],
)
def test_each_fragment_is_mixed_once_a_round_at_its_own_step(
    steps: Any, options: dict[str, int], due: dict[int, tuple[int, ...]]
) -> None:
    asked = every(steps, **options)
    found = {step: asked(step, step == 4) for step in range(max(due) + 1)}  # step 4 ends an epoch
    assert {step: mixed for step, mixed in found.items() if mixed} == due
