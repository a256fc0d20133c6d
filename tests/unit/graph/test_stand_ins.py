"""Control flow of torch's own and compiled parts are captured as the plain Python that they stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zoo import vectors
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import plait
from plait.errors import JobError
from plait.graph.from_job import Captures
from plait.plan.named import resolve
from plait.run.proof.eager_run import run_eager
from plait.run.proof.serial_run import run_serially


class Between(nn.Module):
    """Two layers with something between."""

    def __init__(
        self, between: Callable[[Tensor], Tensor], first: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.first, self.second = first if first is not None else nn.Linear(16, 6), nn.Linear(6, 10)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


def scanned(h: Tensor) -> Tensor:
    _, out = scan(lambda c, x: (c * 0.5 + x, (c + x).tanh()), torch.zeros(h.shape[0]), h.T.contiguous())
    return out.T


def looped(h: Tensor) -> Tensor:
    _, out = while_loop(
        lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.5 + 1), (torch.tensor(0), h.detach().clone())
    )
    return h.tanh() + out


def job_of(model: Callable[[], nn.Module]) -> plait.Job:
    return plait.Job(
        model=model,
        data=vectors(12, 0),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=6,
        steps=2,
    )


def scanned_plainly(h: Tensor) -> Tensor:
    carried, out = torch.zeros(h.shape[0]), []
    for x in h.T:
        out.append((carried + x).tanh())
        carried = carried * 0.5 + x
    return torch.stack(out).T


def looped_plainly(h: Tensor) -> Tensor:
    out = h.detach()
    for _ in range(3):
        out = out * 0.5 + 1
    return h.tanh() + out


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Tensor], Tensor]]] = {
    "scan": (lambda: Between(scanned), scanned_plainly),
    "while_loop": (lambda: Between(looped), looped_plainly),
    "compiled function": (lambda: Between(torch.compile(torch.tanh, backend="eager")), torch.tanh),
    "compiled layer": (
        lambda: Between(torch.tanh, torch.compile(nn.Linear(16, 6), backend="eager")),
        torch.tanh,
    ),
    "compiled model": (lambda: torch.compile(Between(torch.tanh), backend="eager"), torch.tanh),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_captured_and_equals_plain_python(name: str) -> None:
    model, between = MODELS[name]
    plan = run_serially(job_of(model), resolve("1f1b", 2), 2, torch.float32)
    twin = job_of(lambda: Between(between))
    own = run_eager(twin, 2, torch.float32, Captures(twin))
    assert not any("eagerly" in notice for notice in plan.notices), plan.notices
    assert plan.losses == pytest.approx(own.losses, abs=1e-6)
    for parameter, weight in own.weights.items():
        found = {at.replace("_orig_mod.", ""): tensor for at, tensor in plan.weights.items()}
        torch.testing.assert_close(found[parameter], weight)


def test_a_step_with_sparse_tensors_is_eager_and_told() -> None:
    rows = torch.arange(6)

    def sparse(h: Tensor) -> Tensor:
        turned = torch.sparse_coo_tensor(torch.stack([rows, rows.roll(1)]), torch.ones(6), (6, 6))
        return torch.sparse.mm(turned, h.T).T

    job = job_of(lambda: Between(sparse))
    captures = Captures(job)
    plan = run_serially(job, resolve("ddp", 2), 2, torch.float32, captures=captures)
    assert any("eagerly" in notice for notice in plan.notices)
    assert plan.losses == pytest.approx(run_eager(job, 2, torch.float32, captures).losses, abs=1e-6)


def test_a_sparse_buffer_is_refused_by_name() -> None:
    def model() -> nn.Module:
        made = Between(torch.tanh)
        made.register_buffer("adjacent", torch.eye(6).to_sparse())
        return made

    with pytest.raises(JobError, match="adjacent of Between is not dense"):
        job_of(model).build_model()
