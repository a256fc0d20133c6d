"""Parity of every plan that cuts tensors with one process, on convolutional networks and Hugging Face's models: 3 steps
of AdamW with the norm clipped, all ranks in this process, shares never equal."""

import pytest
from tests.unit.run.within import PLANS, assert_equal, check, reference

CONVOLUTIONAL = ("alexnet", "unet", "resnet_bn")
TRANSFORMERS = ("hf_gpt2", "hf_llama", "hf_bert", "hf_vit", "hf_t5")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", [*CONVOLUTIONAL, *TRANSFORMERS])
def test_a_plan_computes_what_one_process_does(name: str, plan: str, ranks: int) -> None:
    assert_equal(check(reference(name), plan, ranks))


@pytest.mark.parametrize("plan", ["zero3", "megatron", "domain"])
@pytest.mark.parametrize("name", ["resnet_bn", "hf_bert"])
def test_with_micro_batches(name: str, plan: str) -> None:
    assert_equal(check(reference(name, 2), plan, 2))


@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        *((name, "megatron", mesh) for name in TRANSFORMERS for mesh in ({"data": 2, "tensor": 4},)),
        ("hf_llama", "sequence", {"data": 4, "tensor": 2}),
        ("hf_gpt2", "zero3", {"data": 2, "tensor": 2}),
        ("hf_bert", "zero3", {"data": 4, "tensor": 2}),
        ("hf_vit", "domain", {"data": 2, "domain": 2}),
        *(
            (name, plan, mesh)
            for name in CONVOLUTIONAL
            for plan, mesh in (
                ("megatron", {"data": 2, "tensor": 2}),
                ("domain", {"data": 2, "domain": 2}),
                ("zero3", {"data": 2, "domain": 2, "tensor": 2}),
            )
        ),
    ],
)
def test_a_mesh_computes_what_one_process_does(name: str, plan: str, mesh: dict[str, int]) -> None:
    assert_equal(check(reference(name), plan, mesh=mesh))
