"""Parity of every plan that cuts tensors with one process, on convolutional networks: 3 steps of AdamW with the norm
clipped, all ranks in this process, shares never equal."""

import pytest
from tests.unit.run.within.within import LARGE_CELLS, assert_equal, check, reference

NAMES = ("alexnet", "unet", "resnet_bn")
MESHES: tuple[tuple[str, dict[str, int]], ...] = (
    ("megatron", {"data": 2, "tensor": 4}),
    ("domain", {"data": 2, "domain": 2}),
    ("zero3", {"data": 2, "domain": 2, "tensor": 2}),
)


@pytest.mark.parametrize(("plan", "ranks"), LARGE_CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_computes_what_one_process_does(name: str, plan: str, ranks: int) -> None:
    assert_equal(check(reference(name), plan, ranks))


@pytest.mark.parametrize("plan", ["zero3", "megatron", "domain"])
def test_batch_statistics_of_micro_batches(plan: str) -> None:
    assert_equal(check(reference("resnet_bn", 2), plan, 2))


@pytest.mark.parametrize(("plan", "mesh"), MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_computes_what_one_process_does(name: str, plan: str, mesh: dict[str, int]) -> None:
    assert_equal(check(reference(name), plan, mesh=mesh))
