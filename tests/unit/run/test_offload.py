"""Training with the optimizer's state on the host: equal to training without, across checkpoints, within its ledger."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.zoo import ZOO
from torch import Tensor, nn

from plait.errors import MisfitError, PlanError, RunError
from plait.job.job import Job
from plait.plan.named import resolve
from plait.program.cost.update import update_work
from plait.run.hold.away.host_memory import HostMemory, MemoryLedger
from plait.run.interpret.updates import _fused
from plait.run.parallelize import parallelize
from plait.run.prepare.prepare import prepare
from plait.run.prepare.programs import Programs
from plait.run.verify import verify
from plait.search.predict.exact import memory_use

OFFLOAD = {"memory": {"offload": ["optimizer"]}}
EVERYTHING = {"memory": {"offload": ["optimizer", "parameters", "activations"]}}
ON_HOST = {"memory": {"offload": ["gradients"]}}
BOTH = {"memory": {"offload": ["optimizer", "gradients:0.5", "parameters"]}}


class Scan(nn.Module):
    """A recurrence: a view of what goes in is needed early in the forward and late in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step, self.last = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.near = nn.Conv1d(8, 8, 3, padding=2, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.near(self.first(x[..., None]).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        x = nn.functional.silu(x)
        state: list[Tensor] = [torch.zeros_like(x[:, 0])]
        rates = nn.functional.softplus(self.step(x))
        for at in range(x.shape[1]):
            state.append(state[-1] * torch.exp(-rates[:, at]) + rates[:, at] * x[:, at])
        return self.last(torch.stack(state[1:], 1))[..., 0]


def layers() -> nn.Module:
    one = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    return nn.Sequential(
        nn.Linear(1, 8), nn.TransformerEncoder(one, 2, enable_nested_tensor=False), nn.Linear(8, 1)
    )


@pytest.mark.parametrize(
    "offload", [["parameters"], ["activations"], ["optimizer", "parameters", "activations"]]
)
@pytest.mark.parametrize(("model", "plan"), [(Scan, "single"), (layers, "single"), (layers, "1f1b")])
def test_with_all_computed_again(model: Any, plan: str, offload: list[str]) -> None:
    """What is computed again shows parameters that have come anew, and activations that had left."""
    shape = (8, 10) if model is Scan else (8, 6, 1)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    job = Job(
        model=model, data=(x, x.roll(1, 1)), batch=4, steps=2, accumulate=2, loss=nn.MSELoss(), clip_norm=0.5,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
    )  # fmt: skip
    settings = {"memory": {"recompute": "full", "offload": offload}}
    outcome = verify(job, plan, 1 if plan == "single" else 2, steps=2, serial=True, settings=settings)
    assert outcome.ok, (outcome.first, outcome.eager_first)


@pytest.mark.parametrize(
    ("plan", "ranks", "options"),
    [
        ("single", 1, {"clip_norm": 0.5}),
        ("single", 1, {"accumulate": 2, "precision": "bf16-weights"}),
        ("ddp", 2, {}),
        ("zero2", 2, {"accumulate": 2}),
        ("zero3", 2, {}),
        ("megatron", 2, {}),
        ("1f1b", 2, {"accumulate": 2}),
    ],
    ids=str,
)
def test_equals_one_process(plan: str, ranks: int, options: dict[str, Any]) -> None:
    job = ZOO["gpt_tied"].job(batch=4, steps=3, optimizer="adamw", **options)
    fp32 = "precision" in options
    settings = OFFLOAD if plan in ("ddp", "zero2") else EVERYTHING
    outcome = verify(job, resolve(plan, ranks, settings), steps=3, serial=True, fp32=fp32)
    assert outcome.ok, outcome.first


@pytest.mark.parametrize(
    ("plan", "ranks", "options", "settings"),
    [
        ("single", 1, {}, ON_HOST),
        (
            "single",
            1,
            {"clip_norm": 0.5, "accumulate": 2},
            {"memory": ON_HOST["memory"] | {"recompute": "full"}},
        ),
        ("ddp", 2, {"clip_norm": 0.5}, ON_HOST),
        ("zero1", 2, {}, ON_HOST),
        ("zero2", 2, {"accumulate": 2, "clip_norm": 0.5}, ON_HOST),
        ("zero3", 2, {}, BOTH),
        ("megatron", 2, {"clip_norm": 0.5}, ON_HOST),
        ("1f1b", 2, {"accumulate": 2, "clip_norm": 0.5}, BOTH),
    ],
    ids=str,
)
def test_updates_on_the_host_equal_one_process(
    plan: str, ranks: int, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    job = ZOO["gpt_tied"].job(batch=4, steps=2, optimizer="adamw", **options)
    outcome = verify(job, resolve(plan, ranks, settings), steps=2, serial=True)
    assert outcome.ok, outcome.first


def test_an_error_of_an_update_on_the_host_is_told() -> None:
    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("a bad optimizer")

    job = job_with(lambda p: Broken(p, lr=0.1))
    step = parallelize(job, resolve("single", 1, ON_HOST), device="cpu")
    with pytest.raises(Exception, match="a bad optimizer"):
        step(job.data)


def test_a_loss_scale_follows_a_step_once_however_many_parts_it_has() -> None:
    job = replace(job_with(lambda p: torch.optim.AdamW(p, lr=0.01)), precision="fp16")
    scales = []
    for settings in ({}, OFFLOAD, ON_HOST):
        step = parallelize(job, resolve("single", 1, settings), device="cpu")
        x, y = (tensor.clone() for tensor in job.data)
        step((x, y))
        x[0, 0] = float("inf")
        step((x, y))
        assert step.state.loss_scale is not None
        scales.append((step.state.loss_scale.factor, step.state.loss_scale.skipped))
    assert scales[0] == scales[1] == scales[2] and scales[0][1] == 1


def test_a_run_goes_on_with_another_setting() -> None:
    job = job_with(lambda p: torch.optim.AdamW(p, lr=0.01))
    wanted = parallelize(job, "single", device="cpu")
    for _ in range(4):
        wanted(job.data)
    changes = [(OFFLOAD, {}), ({}, OFFLOAD), (EVERYTHING, OFFLOAD), (OFFLOAD, EVERYTHING), ({}, ON_HOST)]
    for first, then in (*changes, (ON_HOST, OFFLOAD), (EVERYTHING, ON_HOST)):
        begun = parallelize(job, resolve("single", 1, first), device="cpu")
        begun(job.data), begun(job.data)
        resumed = parallelize(job, resolve("single", 1, then), device="cpu")
        resumed.state.load(begun.checkpoint())
        resumed(job.data), resumed(job.data)
        exact = ON_HOST not in (first, then)  # torch's fused kernel rounds otherwise
        with resumed.whole_model() as found, wanted.whole_model() as model:
            for one, other in zip(found.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


class Lonely(torch.optim.Optimizer):
    """Moves every tensor by the norm of all."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.norm()) for p in given)
        for parameter in given:
            parameter.add_(parameter.grad, alpha=-0.1 / (norm + 1))


def job_with(optimizer: Any) -> Job:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    return Job(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), data=(x, x[:, :2].clone()),
        loss=nn.functional.mse_loss, optimizer=optimizer, batch=8, steps=3,
    )  # fmt: skip


def test_an_optimizer_that_looks_at_all_tensors_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot update some of them alone"):
        parallelize(job_with(Lonely), resolve("single", 1, OFFLOAD), device="cpu")


class Forgetful(torch.optim.SGD):
    """Keeps its state in new tensors every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            kept = self.state[parameter]
            kept["mean"] = 0.9 * kept.get("mean", torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(kept["mean"], alpha=0.1)


def test_state_in_new_tensors_is_kept_too() -> None:
    weights = []
    for settings in ({}, OFFLOAD):
        job = job_with(lambda p: Forgetful(p, lr=0.1))
        step = parallelize(job, resolve("single", 1, settings), device="cpu")
        for _ in range(3):
            step(job.data)
        weights.append([p.detach().clone() for p in step.model.parameters()])
    assert all(map(torch.equal, *weights))


def test_the_ledger_counts_both_sides_and_stops_at_a_limit() -> None:
    memory = HostMemory(torch.device("cpu"))
    given: dict[object, Tensor] = {key: torch.arange(100.0) + at for at, key in enumerate("ab")}
    there = memory.store("x", given)
    assert (
        memory.ledger.host_bytes == 1024 and memory.ledger.device_bytes == 0
    )  # two times 400 bytes, in 256s
    assert all(torch.equal(there[key], given[key]) for key in given)
    memory.fetch("x")
    here = memory.arrive("x")
    assert here is not None and memory.ledger.device_bytes == 1024
    here["a"].mul_(2)
    assert torch.equal(memory.store("x", here)["a"], 2 * given["a"])
    assert memory.ledger.device_bytes == 0 and memory.ledger.device_peak == 1024
    tight = HostMemory(torch.device("cpu"), ledger=MemoryLedger(host_limit=1000))
    with pytest.raises(RunError, match="1024 bytes are on the host at once, and 1000 may be"):
        tight.store("x", given)


def test_strides_survive() -> None:
    memory = HostMemory(torch.device("cpu"))
    given: dict[object, Tensor] = {"t": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    memory.store("x", given)
    memory.fetch("x")
    found = memory.arrive("x")
    assert found is not None and found["t"].stride() == given["t"].stride()
    assert torch.equal(found["t"], given["t"])


def test_auto_keeps_on_the_host_what_it_must() -> None:
    job = ZOO["mlp"].job(batch=4, steps=1, optimizer="adamw", clip_norm=0.5)

    def prepared(offload: str, limit: int | None) -> Programs:
        plan = resolve("single", 1, {"memory": {"offload": offload}})
        return prepare(job, plan, "cpu", torch.float32, lambda event: None, limit_bytes=limit)

    step = prepared("none", None).full_step()
    needed = int(memory_use(step, 0, update_work(step, 0, job.build_optimizer), at_once=False).total)
    assert prepared("auto", needed).plan.memory.offload == "none"
    assert prepared("auto", needed - 1).plan.memory.offload != "none"
    with pytest.raises(MisfitError, match=r"rank 0 needs .* of .*: parameters"):
        prepared("auto", 1000)


@pytest.mark.parametrize("told", [{}, {"foreach": True}, {"fused": False}, {"differentiable": True}])
def test_the_host_uses_one_kernel_where_the_optimizer_leaves_it_open(told: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **told)
    before = optimizer.param_groups[0]["fused"]
    with _fused(optimizer):
        assert optimizer.param_groups[0]["fused"] == (before if told else True)
    assert optimizer.param_groups[0]["fused"] == before
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2).to_sparse()
    with _fused(optimizer):
        assert optimizer.param_groups[0]["fused"] == before
