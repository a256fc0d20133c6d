"""Parity of every plan that cuts tensors with one process, on small networks of every kind: 3 steps of AdamW with the
norm clipped, all ranks in this process, shares never equal.

Where a plan cannot be used, the refusal is the test: what, and what to do instead.
"""

import pytest
from tests.unit.run.within.within import (
    CELLS,
    LESS_CUT,
    PLANS,
    SMALL_BUCKETS,
    assert_equal,
    assert_refused,
    check,
    reference,
)

from plait.errors import JobError, PlanError
from plait.plan.named import resolve
from plait.program.layout import Layout
from plait.run.prepare.prepare import prepare
from plait.run.verify import verify

NAMES = (
    *("mlp", "lstm", "gpt", "gpt_tied", "gpt_dropout", "masked_gpt", "ignore_index"),
    *("graph_network", "moe_dense", "moe_capacity"),
)
REFUSED = {("mlp", "domain"): ("nothing of the batch can be cut", "batch.0 [7, 16]", "domain.dim")}
"""(case, plan) -> what the error says."""


@pytest.mark.parametrize(
    ("name", "plan", "ranks"), [*((name, *cell) for name in NAMES for cell in CELLS), *LESS_CUT]
)
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
def test_many_ranks_without_samples(plan: str) -> None:
    """7 ranks for micro-batches of 4 and 3 samples; a batch that never reaches a rank is refused."""
    assert_equal(check(reference("moe_capacity", 2), plan, 7))
    with pytest.raises(JobError, match="batch=7 is smaller than ranks=8") as caught:
        check(reference("moe_capacity", 2), plan, 8)
    assert caught.value.fix


def groups_of(name: str, ranks: int) -> Layout:
    """How zero3 holds the parameters of a case."""
    known = reference(name)
    plan = resolve("zero3", ranks, {"sync": SMALL_BUCKETS})
    layout = prepare(known.job, plan, "cpu", known.dtype, lambda event: None, known.captures).layout
    assert layout is not None
    return layout


@pytest.mark.parametrize("plan", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["mlp", "gpt_tied"])
def test_uneven_pieces(name: str, plan: str) -> None:
    """On 3 ranks no group of parameters divides evenly, and some parameters lie on one or two of them alone."""
    layout = groups_of(name, 3)
    assert len(layout.groups) > 1, "parameters travel in several groups"
    held = {key: {layout.held_shape(key, rank) for rank in range(3)} for key in layout.parameters}
    assert all(len(shapes) > 1 for shapes in held.values())
    assert any((0,) in shapes for shapes in held.values())
    assert_equal(check(reference(name), plan, 3))


def test_verify_makes_its_own_reference() -> None:
    known = reference("gpt")
    found = verify(known.job, "zero3", 2, steps=1, serial=True)
    assert found.ok, found.first
    assert (found.steps, found.dtype) == (1, "float64")
