"""A small model, a plain PyTorch loop's record, and the same job under many plans, all ranks in this process."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import torch
from tests.unit.run.within.test_within_checkpoints import Meeting
from torch import Tensor, nn

from plait.job.job import Job
from plait.plan.named import resolve
from plait.run.checkpoint.state import TrainingState, snapshot
from plait.run.prepare.prepare import prepare
from plait.run.proof.serial_run import SerialRanks

BATCH, STEPS, SAVED = 6, 6, 3
"""Samples a step, steps, and the step at which a run is saved and goes on under another plan."""
PLANS: dict[str, dict[str, int]] = {
    "single": {},
    "ddp": {"data": 3},
    "zero1": {"data": 2},
    "zero3": {"data": 2},
    "1f1b": {"pipe": 2},
    "megatron": {"tensor": 2},
}
"""Plans, and their meshes."""


class Net(nn.Module):
    """Parts with names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        return self.head(self.norm(self.encoder(x)))


def data() -> tuple[Tensor, Tensor]:
    """Four steps of samples: the later steps are of a second epoch."""
    made = torch.Generator().manual_seed(3)
    return torch.randn(4 * BATCH, 5, generator=made), torch.randint(0, 3, (4 * BATCH,), generator=made)


def job_of(**fields: Any) -> Job:
    """The job, with its rules."""
    given: dict[str, Any] = {
        "model": Net, "data": data(), "loss": nn.CrossEntropyLoss(), "batch": BATCH, "steps": STEPS, "seed": 4,
        "accumulate": 2,
    }  # fmt: skip
    return Job(**given | fields)


@dataclass
class Plain:
    """What a loop has noted."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of every step, as the optimizers saw them; those of parameters without one are absent."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    average: dict[str, Tensor] = field(default_factory=dict)
    """Averaged parameters and buffers."""
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the optimizers, by parameter and key."""


def fresh(job: Job) -> tuple[nn.Module, Callable[[int], Any]]:
    """The model in float64 as the job makes it, and the samples of a step."""
    torch.manual_seed(job.seed)
    assert callable(job.model)
    order = job.order(len(job.data[0]))
    assert order is not None

    def batch(step: int) -> list[Tensor]:
        ids = order.at(step).ids
        return [t[ids].double() if t.is_floating_point() else t[ids] for t in job.data]

    return job.model().double(), batch


def note(plain: Plain, model: nn.Module, loss: Tensor) -> None:
    """What is known before the optimizers step."""
    plain.losses.append(loss.item())
    plain.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def finish(plain: Plain, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Plain:
    """What is left at the end."""
    plain.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        plain.state |= {names[p]: dict(kept) for p, kept in optimizer.state.items() if kept}
    return plain


def ranks_of(
    job: Job, plan: str, mesh: Mapping[str, int], settings: Mapping[str, Any] | None = None
) -> SerialRanks:
    """All ranks of a plan."""
    small = {"sync": {"bucket_mib": 0.0001}} if plan in PLANS and plan != "single" else {}
    chosen = resolve(plan, None, settings or small, dict(mesh))
    programs = prepare(job, chosen, "cpu", torch.float64, lambda event: None)
    return SerialRanks(programs.whole, programs, torch.float64)


def collect(ranks: SerialRanks) -> TrainingState:
    """Rank 0's checkpoint; all ranks take part."""
    count = len(ranks.machines)
    brought: list[Any] = [None] * count
    barrier = Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        found = pool.map(
            lambda machine: machine.state.to_checkpoint({}, Meeting(machine.rank, brought, barrier)),
            ranks.machines,
        )
        return snapshot(next(iter(found)))


def assert_equals(job: Job, wanted: Plain, plan: str, mesh: Mapping[str, int], then: str) -> TrainingState:
    """Train under a plan, save on the way and go on under `then`; both must be what the loop did."""
    ranks = ranks_of(job, plan, mesh)
    check_steps(ranks, wanted, 0, SAVED)
    saved = collect(ranks)
    check_steps(ranks, wanted, SAVED, len(wanted.losses))
    last = collect(ranks)
    check_end(last, wanted)
    if then != plan:
        resumed = ranks_of(job, then, PLANS[then])
        for machine in resumed.machines:
            machine.state.load(saved)
        check_steps(resumed, wanted, SAVED, len(wanted.losses))
        check_end(collect(resumed), wanted)
    return last


def check_steps(ranks: SerialRanks, wanted: Plain, first: int, last: int) -> None:
    """Losses, and every gradient that an optimizer saw."""
    for step in range(first, last):
        for seen in ranks._gradients:
            seen.clear()
        assert ranks.run(step)
        assert abs(ranks.outcome.loss - wanted.losses[step]) <= 1e-9 * abs(wanted.losses[step]), step
        assert_close(ranks.gradients(), wanted.gradients[step], f"gradients of step {step}")


def check_end(found: TrainingState, wanted: Plain) -> None:
    """Weights and the optimizers' state."""
    assert_close(found.parameters, wanted.weights, "weights")
    assert_close(found.average, wanted.average, "averages")
    kept = {name: {k: v for k, v in of.items() if isinstance(v, Tensor)} for name, of in wanted.state.items()}
    assert {n: set(of) for n, of in found.optimizer.tensors.items() if of} == {
        n: set(of) for n, of in kept.items() if of
    }
    for name, of in kept.items():
        assert_close(found.optimizer.tensors.get(name, {}), of, f"state of {name}")


def assert_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """Within 1e-9 of each tensor's largest value, as parity is defined in float64; of noise, 1e-12 at all."""
    assert found.keys() == wanted.keys(), what
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, (what, name)
        allowed = max(1e-9 * float(tensor.abs().max()), 1e-12)
        assert float((found[name] - tensor).abs().max()) <= allowed, (what, name)
