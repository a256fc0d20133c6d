"""Weights that are tensors made of others, as quantized ones are: frozen, beside weights that are trained."""

# mypy: ignore-errors

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from plait.errors import PlanError
from plait.job.job import Job
from plait.run.checkpoint.state import TrainingState, collect_model, restore_model
from plait.run.hold.replicas import digest
from plait.run.setup.agreement import digest_of
from plait.run.verify import verify

aten = torch.ops.aten


class Int8(Tensor):
    """Rows of 8 bits and their scales, of which few ops are known, as in torchao."""

    @staticmethod
    def __new__(cls, rows: Tensor, scale: Tensor) -> "Int8":
        return Tensor._make_wrapper_subclass(cls, rows.shape, dtype=scale.dtype)

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        self.rows, self.scale = rows, scale

    def __tensor_flatten__(self) -> Any:
        return ["rows", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, _: Any, size: Any, stride: Any) -> "Int8":
        return Int8(parts["rows"], parts["scale"])

    def __repr__(self) -> str:
        return "Int8(...)"

    @classmethod
    def of(cls, weight: Tensor) -> "Int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and not isinstance(args[0], Int8):
            own = args[1]
            return F.linear(args[0], own.rows.to(args[0].dtype) * own.scale.to(args[0].dtype), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if op in (aten.detach.default, aten.clone.default, aten.alias.default):
            made = cls(*(op(part) for part in (args[0].rows, args[0].scale)))
            return return_and_correct_aliasing(op, args, kwargs, made)
        raise NotImplementedError(f"Int8 has no {op}")


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        weight = Int8.of(self.body.weight.detach())
        self.body.weight = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6) / 3), nn.Parameter(torch.randn(6, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.body(x) + x @ self.down.T @ self.up.T).relu())


def job() -> Job:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    return Job(
        model=Adapted,
        data=[(x[i], torch.tensor(i % 3)) for i in range(12)],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1),
        batch=6,
        steps=2,
    )


def test_a_plan_is_compared_with_one_process_and_with_the_users_own_code() -> None:
    found = verify(job(), "ddp", 2, serial=True)
    assert found.ok
    assert found.dtype == "float32"
    assert any("body.weight (Int8) is a tensor made of others" in notice for notice in found.notices)
    kinds = {entry.kind for entry in found.differences}
    assert {"weight", "spread"} <= kinds


def test_plans_that_cut_parameters_refuse_them() -> None:
    with pytest.raises(
        PlanError, match=r"body\.weight is a Int8, a tensor made of others, which cannot be cut"
    ):
        verify(job(), "zero3", 2, serial=True)


def test_a_checkpoint_holds_what_they_are_made_of(tmp_path: Path) -> None:
    one, other = Adapted(), Adapted()
    parameters, buffers, aliases, transient = collect_model(one)
    assert parameters["body.weight.rows"].dtype == torch.int8
    assert "body.weight" not in parameters
    state = TrainingState(
        step=0, parameters=parameters, buffers=buffers, aliases=aliases, transient=transient
    )
    restore_model(other, state)
    assert torch.equal(other.body.weight.rows, one.body.weight.rows)
    assert torch.equal(other.body.weight.scale, one.body.weight.scale)


def test_a_bit_of_a_part_changes_digests() -> None:
    model = Adapted()
    before = digest_of(dict(model.named_parameters())), int(digest(model.body.weight))
    model.body.weight.rows[1, 2] += 1
    after = digest_of(dict(model.named_parameters())), int(digest(model.body.weight))
    assert before[0] != after[0]
    assert before[1] != after[1]
