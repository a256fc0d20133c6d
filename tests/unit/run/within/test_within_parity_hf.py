"""Parity of every plan that cuts tensors with one process, on Hugging Face's models: 3 steps of AdamW with the norm
clipped, all ranks in this process, shares never equal."""

import pytest
from tests.unit.run.within.within import LARGE_CELLS, assert_equal, check, reference

NAMES = ("hf_gpt2", "hf_llama", "hf_bert", "hf_vit", "hf_t5")
MESHES: tuple[tuple[str, str, dict[str, int]], ...] = (
    *((name, "megatron", {"data": 2, "tensor": 4}) for name in NAMES),
    ("hf_llama", "sequence", {"data": 4, "tensor": 2}),
    ("hf_gpt2", "zero3", {"data": 2, "tensor": 2}),
    ("hf_bert", "zero3", {"data": 4, "tensor": 2}),
    ("hf_vit", "domain", {"data": 2, "domain": 2}),
)


@pytest.mark.parametrize(("plan", "ranks"), LARGE_CELLS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_computes_what_one_process_does(name: str, plan: str, ranks: int) -> None:
    assert_equal(check(reference(name), plan, ranks))


@pytest.mark.parametrize("plan", ["zero3", "megatron", "domain"])
def test_ragged_masks_with_micro_batches(plan: str) -> None:
    assert_equal(check(reference("hf_bert", 2), plan, 2))


@pytest.mark.parametrize(("name", "plan", "mesh"), MESHES, ids=str)
def test_a_mesh_computes_what_one_process_does(name: str, plan: str, mesh: dict[str, int]) -> None:
    assert_equal(check(reference(name), plan, mesh=mesh))
