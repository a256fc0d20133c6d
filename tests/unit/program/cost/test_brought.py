"""What a rank brings to a collective: the tensor that is in the program, whichever kind of value it is."""

from math import prod
from typing import Any

import pytest
import torch
from tests.unit.program.exact_programs import compiled

from plait.program.cost.brought import brought
from plait.program.instructions import Collective


@pytest.mark.parametrize(
    ("plan", "settings", "dtype"),
    [
        ("ddp", {}, torch.float32),
        ("ddp", {"sync": {"compress": "bf16"}}, torch.bfloat16),
        ("zero3", {}, torch.float32),
    ],
)
def test_what_is_brought_has_the_dtype_that_travels(
    plan: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    program = compiled("mlp", plan, {"data": 2}, 4, settings=settings)
    own = program.of(0)
    found = [i for i in own.instructions if isinstance(i, Collective) and i.num_bytes > 1000]
    assert found
    for collective in found:
        shape, kind = brought(program, own, collective)
        assert kind == dtype
        ranks = 2 if collective.op == "all_gather" else 1
        assert ranks * prod(shape) * kind.itemsize == collective.num_bytes
