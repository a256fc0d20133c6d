"""Plans that meet a job they do not suit: refused before anything runs, or used with a notice of what stays whole."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml
from tests.unit.run.within.within import assert_refused
from tests.zoo import ZOO

from plait.errors import PlanError
from plait.plan.named import resolve
from plait.plan.plan import parse_plan
from plait.run.prepare.prepare import prepare


def notices(name: str, plan: str | Mapping[str, Any], ranks: int | None = None, **more: Any) -> str:
    """What a person is told when a case is prepared under a plan, or under the contents of a plan file."""
    events: list[dict[str, Any]] = []
    given = plan if isinstance(plan, str) else parse_plan(yaml.safe_dump(plan))
    chosen = resolve(given, ranks, more.get("settings"), more.get("mesh"))
    prepare(ZOO[name].job(batch=16), chosen, "cpu", torch.float32, events.append)
    return " ".join(text for event in events for text in event["notices"])


def placed(axis: str = "tensor", plan: str = "megatron", **groups: Mapping[str, str]) -> Mapping[str, Any]:
    """A plan file with placements along an axis of two ranks."""
    mesh = {"data": 2} if plan == "ddp" else {"domain" if plan == "domain" else "tensor": 2}
    return {"plan": plan, "mesh": mesh, "placements": {axis: groups}}


# --- what stays whole is told -------------------------------------------------------------------------------


def test_heads_that_do_not_divide_stay_whole() -> None:
    told = notices("gpt", "megatron", 8)
    assert "stays whole: blocks.0.attention.qkv: aten.view (blocks.0.attention" in told
    assert "zoo.py:" in told, "the source line"
    assert "cannot run on 8 shards S(2) of [16, 8, 32] to [16, 8, 4, 8]" in told
    assert "8 of 29 parameters cut" in told, "the rest is cut"


def test_fewer_keys_than_ranks_stay_whole() -> None:
    told = notices("hf_llama", "megatron", 4)
    assert "stays whole: model.layers.0.self_attn.k_proj" in told
    assert "q_proj" not in told


def test_rows_too_few_for_the_pieces_are_gathered() -> None:
    assert "tensors are gathered on every rank for aten.convolution" in notices("unet", "domain", 8)


# --- what cannot be had is refused --------------------------------------------------------------------------

REFUSED: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "heads and everything else": (
        {"name": "gpt", "plan": "megatron", "ranks": 3},
        ("tensor=3: nothing can use it", "blocks.0.attention.qkv", "zoo.py:", "3 does not divide 128", "data=3"),
    ),
    "no layer to cut": (
        {"name": "linear", "plan": "megatron", "ranks": 2},
        ("tensor=2: nothing can use it", "2 does not divide 1"),
    ),
    "positions that do not divide": (
        {"name": "gpt", "plan": "domain", "ranks": 3}, ("dim 1 of batch.0 [16, 8] has 8", "3 does not divide", "pad"),
    ),
    "a dim that is not there": (
        {"name": "gpt", "plan": "domain", "ranks": 2, "settings": {"domain": {"dim": 2}}},
        ("nothing of the batch can be cut on dim 2",),
    ),
    "channels as a domain": (
        {"name": "unet", "plan": "domain", "ranks": 2, "settings": {"domain": {"dim": 1}}},
        ("dim 1 of batch.0 [16, 1, 16, 16] has 1",),
    ),
    "memory limit": (
        {
            "name": "gpt", "plan": "tensor", "ranks": 2,
            "settings": {"memory": {"limit": "1KiB"}, "tensor": {"seconds": 1.0}},
        },
        ("memory.limit=1KiB", "raise memory.limit"),
    ),
    "single on a mesh": ({"name": "gpt", "plan": "single", "mesh": {"tensor": 2}}, ("single runs on 1 rank",)),
    "an uncapturable model on a mesh": (
        {"name": "branching", "plan": "ddp", "mesh": {"data": 2, "tensor": 2}},
        ("needs the inside of the model for tensor=2", "zoo.py:", "ddp run it eagerly"),
    ),
    "placements along an unknown axis": (
        {"name": "gpt", "plan": placed("tensr", parameters={"head.weight": "S(0)"})},
        ("placements along 'tensr'", "placements.tensor"),
    ),
    "placements along data": (
        {"name": "gpt", "plan": placed("data", parameters={"head.weight": "S(0)"})}, ("placements along 'data'",),
    ),
    "placements along an axis that the mesh lacks": (
        {"name": "gpt", "plan": placed("tensor", "ddp", parameters={"head.weight": "S(0)"})},
        ("placements along tensor, which its mesh does not have", "add tensor to the mesh"),
    ),
    "a parameter that is a sum": (
        {"name": "gpt", "plan": placed(parameters={"head.weight": "P"})}, ("head.weight is given", "use R or S(dim)"),
    ),
    "samples along tensor": (
        {"name": "gpt", "plan": placed(batch={"batch.0": "S(0)"})}, ("dim 0 of batch.0 holds the samples", "data=2"),
    ),
    "samples along domain": (
        {"name": "gpt", "plan": placed("domain", "domain", batch={"batch.0": "S(0)"})}, ("holds the samples",),
    ),
    "a tensor that the batch lacks": (
        {"name": "gpt", "plan": placed("domain", "domain", batch={"batch.7": "S(1)"})},
        ("no tensor of the batch is called 'batch.7'", "batch.0"),
    ),
    "an op with too many inputs": (
        {"name": "mlp", "plan": placed(ops={"0 forward addmm 1": "R R R R -> R"})}, ("cannot run as", "can run as"),
    ),
}  # fmt: skip
"""Name -> (arguments of `notices`, what the error says)."""


@pytest.mark.parametrize("name", REFUSED)
def test_complaint_08_refused_with_a_reason_and_a_fix(name: str) -> None:
    given, told = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        notices(**given)
    assert_refused(caught.value, *told)
