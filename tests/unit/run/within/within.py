"""Verify a case of the zoo under a plan, in one process; captures and the one-process run are shared by all plans.

In: the name of a case, a plan with its mesh and settings. Out: a `Verification`, or the `PlanError` that refused it.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.unit.run.pipeline.pipelines import NUM_SAMPLES, captures, is_compared
from tests.unit.run.training import CASES
from tests.zoo import ZOO

from plait.errors import PlanError
from plait.run.interpret.serial import Reduce, add_up
from plait.run.proof.reference import Reference, reference_of
from plait.run.verify import Verification, verify

BATCH, STEPS = 7, 3
"""No number of ranks divides the batch."""
SMALL_BUCKETS = {"bucket_mib": 0.01}
"""About 1300 numbers in float64: parameters travel in several groups."""


@cache
def reference(name: str, accumulate: int = 1, steps: int = STEPS, optimizer: str = "adamw") -> Reference:
    """What one process makes of a case: AdamW, with the gradient's norm clipped."""
    enough = BATCH * steps <= NUM_SAMPLES
    job = {**ZOO, **CASES}[name].job(
        batch=BATCH, steps=steps, num_samples=NUM_SAMPLES if enough else BATCH * steps, optimizer=optimizer,
        clip_norm=0.5, accumulate=accumulate,
    )  # fmt: skip
    known = captures(name) if enough else None
    return reference_of(job, steps=steps, captures=known, eager=is_compared(name))


PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "megatron": ("megatron", {}),
    "sequence": ("megatron", {"tensor": {"sequence": True}}),
    "tensor": ("tensor", {"tensor": {"seconds": 5.0}}),
    "domain": ("domain", {}),
}
"""Name in these tests -> name of the plan, its settings."""
CELLS = (
    ("zero3", 4), ("megatron", 2), ("megatron", 4), ("sequence", 4), ("tensor", 2),
    ("domain", 2), ("domain", 4),
)  # fmt: skip
"""Plans and ranks under which every small model is tried. Of ZeRO one number of ranks: what it cuts has no shape, and
uneven and empty shards are tried on 3 and 7 ranks. The solver's placements on 4 ranks are tried on one model."""
LESS_CUT = tuple(
    (name, *cell) for name in ("mlp", "gpt_tied", "moe_capacity") for cell in (("zero1", 4), ("zero2", 2))
)
"""Cases under zero1 and zero2, which know nothing of a model but the shapes of its parameters."""
LARGE_CELLS = (("zero3", 4), ("megatron", 2), ("sequence", 4), ("tensor", 2), ("domain", 4))
"""Those of large models, which are tried on meshes too: what zero1 and zero2 do depends on the shapes of parameters
alone, 4 ranks of `tensor` are part of a mesh, and 4 of `domain` cut what 2 cut."""


def check(
    known: Reference,
    plan: str,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    reduce: Reduce = add_up,
) -> Verification:
    """Verify a plan of `PLANS` on all its ranks in this process."""
    name, settings = PLANS[plan]
    settings = {"sync": SMALL_BUCKETS, **settings}
    return verify(
        known.job, name, ranks, mesh=mesh, settings=settings, serial=True, against=known, reduce=reduce
    )


def assert_equal(found: Verification) -> None:
    """Every loss, gradient, norm, weight and buffer, on all ranks."""
    assert found.ok, found.first
    kinds = {difference.kind for difference in found.differences}
    assert kinds >= {"loss", "gradient", "norm", "weight", "spread"}


def assert_refused(error: PlanError, *words: str) -> None:
    """One line that says what, another what to do."""
    assert error.fix
    assert "\n" not in error.what
    for word in words:
        assert word in str(error), str(error)
