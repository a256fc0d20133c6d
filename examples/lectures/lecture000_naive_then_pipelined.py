"""Naive model parallelism's idle devices, then micro-batches: lectures 000 and 004.

python -m examples.lectures.lecture000_naive_then_pipelined
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import timeline
from examples.lectures.runs import trained
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.report.breakdown import breakdown

RANKS, MICRO_BATCHES, STEPS, BATCH = 2, 8, 5, 2048


def deep() -> nn.Module:
    """Eight equal layers: four a stage."""
    return nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.Tanh())), nn.Linear(512, 8)
    )


def job(accumulate: int) -> plait.Job:
    x = torch.randn(BATCH, 512, generator=torch.Generator().manual_seed(0))
    return plait.Job(
        model=deep,
        data=TensorDataset(x, x[:, :8]),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=BATCH,
        accumulate=accumulate,
        steps=STEPS,
    )


def exhibit() -> Exhibit:
    rows: list[list[float | str]] = []
    pictures, idle, losses, took = {}, {}, {}, {}
    for plan, micro_batches in (("naive", 1), ("gpipe", MICRO_BATCHES), ("1f1b", MICRO_BATCHES)):
        with trained(job(micro_batches), plan, RANKS) as result:
            trace, losses[plan] = plait.read_run(result.folder).trace, result.losses
        assert trace is not None
        parts = breakdown(trace)
        idle[plan] = sum(
            part.share("idle_s") + part.share("exposed_communication_s") for part in parts
        ) / len(parts)
        step = took[plan] = sum(part.step_s for part in parts) / len(parts)
        rows.append([plan, micro_batches, f"{1e3 * step:.1f} ms", f"{idle[plan]:.0%}"])
        pictures[
            f"{plan}: one step on {RANKS} processes, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
        ] = timeline(f"{plan}, measured", trace, STEPS - 2, lanes=("compute",))
    ideal = 1 - 1 / RANKS
    return Exhibit(
        lecture="000",
        title="Naive model parallelism leaves devices idle; micro-batches fill them",
        idea="Layers on different devices depend on each other, so with one batch only one device works "
        "at a time: severe under utilization, says the lecture. A batch that is cut into micro-batches "
        "keeps the others busy but for a bubble at both ends.",
        numbers=[
            Number(what="time that a device waits, naive, by counting", ours=ideal),
            Number(what="the same, measured", ours=idle["naive"]),
            Number(
                what=f"bubble of GPipe, {MICRO_BATCHES} micro-batches, by counting (p - 1)/(m + p - 1)",
                ours=(RANKS - 1) / (MICRO_BATCHES + RANKS - 1),
            ),
            Number(what="GPipe, measured", ours=idle["gpipe"]),
            Number(what="speed of GPipe to naive", ours=took["naive"] / took["gpipe"]),
            Number(what="largest difference of losses between the three", ours=f"{_spread(losses):.1e}"),
        ],
        tables=[
            Table(
                title="Measured on two processes",
                columns=["plan", "micro-batches", "step", "waiting"],
                rows=rows,
            )
        ],
        pictures=pictures,
        seen="The three train the same thing. Waiting counts everything in which a process does not "
        "compute, so it is above the bubble by what messages and a shared machine cost. GPipe and 1F1B have "
        "the same bubble; 1F1B remembers fewer micro-batches, and which of the two is faster on two cores "
        "is a matter of what else they do.",
    )


def _spread(losses: dict[str, tuple[float, ...]]) -> float:
    naive = losses["naive"]
    return max(abs(a - b) for other in losses.values() for a, b in zip(naive, other, strict=True))


if __name__ == "__main__":
    show(exhibit())
