"""EASGD, lecture 004: equations (1) and (2) and Algorithm 1, each variant of plait against a loop that is written out.

python -m examples.lectures.lecture004_easgd
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.runs import trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import plait

ETA, RHO, STEPS, SAMPLES = 0.05, 2.0, 30, 32


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    truth = torch.tensor([[1.0, -2.0, 0.5, 3.0]]).double()
    return TensorDataset(
        x, x @ truth.T + 0.3 * torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)
    )


def model() -> nn.Module:
    made = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        made.weight.zero_()
    return made


def job() -> plait.Job:
    """Every step takes all samples, so worker i always has the i-th chunk."""
    return plait.Job(
        model=model,
        data=points,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=ETA),
        batch=SAMPLES,
        steps=STEPS,
        shuffle=False,
    )


def gradient(w: Tensor, worker: int, workers: int) -> Tensor:
    x, y = (tensor.chunk(workers)[worker] for tensor in points().tensors)
    return 2 * (x @ w.T - y).T @ x / len(x)


def together(workers: int) -> Tensor:
    """Equations (1) and (2): all workers and the center move at once, from where they all were."""
    center = torch.zeros(1, 4, dtype=torch.float64)
    own = [center.clone() for _ in range(workers)]
    for _ in range(STEPS):
        apart = [w - center for w in own]
        own = [
            w - ETA * (gradient(w, i, workers) + RHO * away)
            for i, (w, away) in enumerate(zip(own, apart, strict=True))
        ]  # (1)
        center = center + ETA * RHO * sum(apart[1:], start=apart[0])  # (2)
    return center


def in_turn(workers: int) -> Tensor:
    """Algorithm 1: worker j = t mod G computes, moves by (1), and the center by its distance (lines 7 to 14)."""
    center = torch.zeros(1, 4, dtype=torch.float64)
    own = [center.clone() for _ in range(workers)]
    for t in range(STEPS * workers):
        j = t % workers
        away = own[j] - center
        own[j] = own[j] - ETA * (gradient(own[j], j, workers) + RHO * away)  # line 13
        center = center + ETA * RHO * away  # line 14
    return center


def by_plait(variant: str, ranks: int) -> Tensor:
    settings = {"elastic": {"variant": variant, "tau": 1, "rho": RHO}}
    with trained(
        job(), "easgd", ranks, changes=plait.Changes(settings=settings), saving=plait.Saving(trace=False)
    ) as result:
        return result.weights["weight"]


def exhibit() -> Exhibit:
    pairs = {
        "sync, 2 workers: equations (1) and (2)": (by_plait("sync", 2), together(2)),
        "round-robin, 2 workers and a center: Algorithm 1": (by_plait("round-robin", 3), in_turn(2)),
        "async, 1 worker and a center: the same with G = 1": (by_plait("async", 2), in_turn(1)),
    }
    best = torch.linalg.lstsq(*points().tensors).solution.T
    rows: list[list[float | str]] = []
    worst = 0.0
    for name, (found, written) in pairs.items():
        gap = (found - written).abs().max().item()
        worst = max(worst, gap)
        rows.append([name, f"{gap:.1e}", f"{(found - best).norm().item():.3f}"])
    return Exhibit(
        lecture="004",
        title="Elastic averaging against its own equations",
        idea="In EASGD every worker has weights of its own, drawn to a center by a spring of strength "
        "rho, and the center is drawn to the workers. The lecture gives both equations, and an algorithm "
        "in which workers exchange with the center in turn. plait has both, and a third variant in which "
        "they come as they are ready.",
        numbers=[
            Number(
                what="largest difference of a center's weight after 30 steps, all variants",
                ours=f"{worst:.1e}",
            )
        ],
        tables=[
            Table(
                title="The center after 30 steps, float64",
                columns=["variant", "difference to the loop", "distance to the least-squares solution"],
                rows=rows,
            )
        ],
        seen="All agree to rounding. Equation (2) moves the center by all workers at once, line 14 by "
        "one after the other: two sequences of centers that end close to each other. (Line 3 numbers "
        "workers from 1 to G, line 7's `t mod G` from 0 to G - 1.)",
    )


if __name__ == "__main__":
    show(exhibit())
