"""Train a case of the zoo in one process: eagerly, on one rank, on many. Captures and programs are shared by tests.

In: the name of a case and what differs from the default job. Out: a `Trained` with everything that parity compares.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from tests.zoo import ZOO, Case, images, token_loss, tokens
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.graph.from_job import Captures
from plait.job.data.loader import Loader
from plait.job.data.open import open_data
from plait.job.data.share import Share
from plait.job.job import Job
from plait.job.order import SampleOrder
from plait.plan.named import resolve
from plait.run.hold.state import ModelState, in_float64
from plait.run.interpret.machine import Machine
from plait.run.interpret.serial import Mailboxes, Reduce, SerialLinks, Unobserved, add_up, run_step
from plait.run.prepare.programs import Programs

BATCH, NUM_SAMPLES, STEPS = 7, 19, 3
"""Steps of 7, 7 and 5 samples: the last one is smaller, and no number of ranks divides them evenly."""


def small_batch_norm() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.BatchNorm2d(4),
            nn.LeakyReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        *(nn.Linear(64, 6, bias=False), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 10)),
    )


class TransposedNorm(nn.Module):
    """Batch norm of positions [N, T, C] as channels [N, C, T], a view that does not lie in memory in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.embed(x).transpose(1, 2)).transpose(1, 2).relu())
        return output


def other_norms() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.PReLU(4),
            nn.Upsample(scale_factor=2),
        ),
        *(nn.Conv2d(4, 4, 3, stride=4), nn.InstanceNorm2d(4, affine=True), nn.Hardswish(), nn.AvgPool2d(2)),
        *(nn.ReflectionPad2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


CASES: dict[str, Case] = {
    **{name: case for name, case in ZOO.items() if case.capturable},
    "small_batch_norm": Case(
        model=small_batch_norm, samples=images, loss=nn.CrossEntropyLoss(), batch_statistics=True
    ),
    "transposed_norm": Case(model=TransposedNorm, samples=tokens, loss=token_loss, batch_statistics=True),
    "other_norms": Case(model=other_norms, samples=images, loss=nn.CrossEntropyLoss()),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run computed."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    """By step."""
    state: dict[str, Tensor]
    """Parameters and buffers in the end."""
    norms: list[tuple[float, ...]]
    """By step, then by rank; where clipping computed them."""
    rates: list[float]
    """Learning rate of each step."""
    weights: list[float]
    """What each step's loss was divided by."""
    ids: list[list[int]]
    """Sample ids by step, as the ranks got them, rank after rank."""
    spread: float
    """Largest difference between the states of two ranks."""


@cache
def captures(name: str, dtype: torch.dtype, precision: str) -> Captures:
    """The graphs of a case, whatever it is trained with."""
    return Captures(case_job(name, dtype, precision=precision), None, dtype)


def uncapturable_job(**changes: Any) -> Job:
    """The job of a model whose Python control flow depends on the data."""
    return ZOO["branching"].job(**({"batch": BATCH, "steps": STEPS, "num_samples": NUM_SAMPLES} | changes))


def case_job(name: str, dtype: torch.dtype, **changes: Any) -> Job:
    """The job of a case."""
    given: dict[str, Any] = {"batch": BATCH, "steps": STEPS, "num_samples": NUM_SAMPLES} | changes
    return {**ZOO, **CASES}[name].job(**given)


def train(
    name: str,
    ranks: int,
    *,
    dtype: torch.dtype = torch.float64,
    reduce: Reduce = add_up,
    bucket_mib: float = 8.0,
    **changes: Any,
) -> Trained:
    """All ranks in this process; one rank is the plan `single`."""
    job = case_job(name, dtype, **changes)
    known = programs(name, dtype, ranks, bucket_mib, job.precision, job.clip_norm, job.batch_norm)
    return train_job(job, ranks, dtype, known, reduce)


@cache
def programs(
    name: str,
    dtype: torch.dtype,
    ranks: int,
    bucket_mib: float,
    precision: str,
    clip_norm: float | None,
    batch_norm: str,
) -> Programs:
    """The programs of a case, whatever its optimizer and its samples."""
    job = case_job(name, dtype, precision=precision, clip_norm=clip_norm, batch_norm=batch_norm)
    plan = resolve("single" if ranks == 1 else "ddp", ranks, {"sync": {"bucket_mib": bucket_mib}})
    known = captures(name, dtype, precision)
    return Programs(job, known.source, plan, torch.device("cpu"), dtype, known)


def train_job(
    job: Job, ranks: int, dtype: torch.dtype, known: Programs | None = None, reduce: Reduce = add_up
) -> Trained:
    """Like `train`, for a job of one's own."""
    source = open_data(job.data, job.collate)
    cpu = torch.device("cpu")
    plan = known.plan if known is not None else resolve("single" if ranks == 1 else "ddp", ranks)
    used = known if known is not None else Programs(job, source, plan, cpu, dtype)
    boxes = Mailboxes(plan.mesh, reduce)
    machines = [
        Machine(rank, ModelState(job, cpu, dtype), SerialLinks(boxes, rank), Unobserved())
        for rank in range(ranks)
    ]
    gradients: list[dict[str, Tensor]] = []
    machines[0].store.on_ready = lambda found: gradients.append(
        {key: value.clone() for key, value in found.items()}
    )
    losses, norms, rates, weights, ids = [], [], [], [], []
    assert job.steps is not None
    for step in range(job.steps):
        shares = [_shares(job, source, step, rank, ranks) for rank in range(ranks)]
        run_step(machines, used.for_step(shares[0]), step, shares)
        outcomes = [machine.outcome for machine in machines if machine.outcome is not None]
        assert len({outcome.loss for outcome in outcomes}) == 1, "ranks report different losses"
        losses.append(outcomes[0].loss)
        weights.append(float(outcomes[0].weight))
        norms.append(tuple(float(outcome.norm) for outcome in outcomes if outcome.norm is not None))
        rates.append(float(machines[0].state.optimizer.param_groups[0]["lr"]))
        ids.append([sample for share in shares for micro in share for sample in micro.ids])
    states = [dict(machine.state.model.state_dict()) for machine in machines]
    spread = max((_distance(states[0][key], other[key]) for other in states for key in other), default=0.0)
    return Trained(
        losses=losses, gradients=gradients, state=states[0], norms=norms, rates=rates,
        weights=weights, ids=ids, spread=spread,
    )  # fmt: skip


def _shares(job: Job, source: Any, step: int, rank: int, ranks: int) -> tuple[Share, ...]:
    order = order_of(job, source.num_samples)
    with Loader(
        source=source, order=order, batch=job.batch, accumulate=job.accumulate, rank=rank, ranks=ranks,
        start_step=step, stop_step=step + 1, depth=1,
    ) as loader:  # fmt: skip
        return next(iter(loader)).micro_batches


def order_of(job: Job, num_samples: int) -> SampleOrder:
    """The order of the job's samples."""
    return SampleOrder(
        num_samples=num_samples,
        batch=job.batch,
        accumulate=job.accumulate,
        seed=job.seed,
        shuffle=job.shuffle,
    )


def train_eagerly(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Trained:
    """A loop that anybody would write, with the same samples."""
    job = case_job(name, dtype, **changes)
    job = in_float64(job) if dtype == torch.float64 else job
    model = job.build_model().to(dtype).train()
    optimizer = job.build_optimizer(list(model.named_parameters()))
    source = open_data(job.data, job.collate)
    order = order_of(job, source.num_samples or 0)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    norms: list[tuple[float, ...]] = []
    assert job.steps is not None
    for step in range(job.steps):
        batch = pytree.tree_map_only(
            Tensor,
            lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf,
            source.fetch(order.at(step).ids),
        )
        optimizer.zero_grad()
        loss = job.objective_of(model, batch)
        loss = loss if isinstance(loss, Tensor) else loss[0] / loss[1]
        loss.backward()
        if isinstance(job.clip_norm, float):
            norms.append((float(nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)),))
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        losses.append(loss.item())
    return Trained(
        losses=losses, gradients=gradients, state=dict(model.state_dict()), norms=norms, rates=[],
        weights=[], ids=[], spread=0.0,
    )  # fmt: skip


def compare(
    found: Trained,
    wanted: Trained,
    *,
    tolerance: float = 1e-9,
    floor: float = 1e-12,
    loss_tolerance: float = 1e-9,
) -> list[str]:
    """Every loss, gradient, weight and buffer that differs: by more than `tolerance` of its tensor's largest value, and
    by more than `floor` of the norm of all tensors of its kind (what is zero in exact arithmetic is noise)."""
    wrong = [
        f"loss of step {step}: {a} for {b}"
        for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True))
        if not abs(a - b) <= loss_tolerance * max(abs(b), 1.0)
    ]
    pairs = [
        (f"gradient at step {s}", a, b)
        for s, (a, b) in enumerate(zip(found.gradients, wanted.gradients, strict=True))
    ]
    for kind, ours, theirs in [*pairs, ("state", found.state, wanted.state)]:
        if ours.keys() != theirs.keys():
            wrong.append(f"{kind} has {sorted(ours.keys() ^ theirs.keys())} on one side only")
            continue
        norm = sum(float(t.double().square().sum()) for t in theirs.values()) ** 0.5
        for key in theirs:
            allowed = max(tolerance * _largest(theirs[key]), floor * norm)
            distance = _distance(ours[key], theirs[key])
            if not distance <= allowed:
                wrong.append(f"{kind} of {key}: differs by {distance:.2g}, allowed {allowed:.2g}")
    if found.spread != 0.0:
        wrong.append(f"ranks hold different states: {found.spread:.2g}")
    return wrong


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _distance(a: Tensor, b: Tensor) -> float:
    return _largest(a.double() - b.double()) if a.shape == b.shape else float("inf")
