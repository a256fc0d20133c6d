"""PipeDream beside 1F1B, lectures 001 and 004: no flush and stale weights against a flush and exact ones.

python -m examples.lectures.lecture001_pipedream
"""

import torch
from examples.digits_mlp import accuracy, digits
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves, timeline
from examples.lectures.runs import trained
from torch import nn

import plait
from plait.report.breakdown import breakdown

RANKS, EPOCHS = 2, 6


def network() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), *layers, nn.Linear(256, 10))


def job() -> plait.Job:
    return plait.Job(
        model=network,
        data=digits,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        batch=64,
        accumulate=4,
        epochs=EPOCHS,
        evaluate=lambda: digits(held_out=True),
        metrics={"accuracy": accuracy},
    )


def exhibit() -> Exhibit:
    lines: dict[str, list[tuple[float, float]]] = {}
    rows, pictures, scores = [], {}, {}
    for plan in ("single", "1f1b", "pipedream"):
        with trained(job(), plan, None if plan == "single" else RANKS) as result:
            trace, losses, scores[plan] = (
                plait.read_run(result.folder).trace,
                result.losses,
                result.evaluation["accuracy"],
            )
        assert trace is not None
        parts = breakdown(trace)
        waiting = sum(p.share("idle_s") + p.share("exposed_communication_s") for p in parts) / len(parts)
        lines[plan] = [(float(at), loss) for at, loss in enumerate(losses)]
        rows.append([plan, f"{losses[-1]:.4f}", f"{scores[plan]:.3f}", f"{waiting:.0%}"])
        if plan != "single":
            pictures[f"{plan}: one step, measured; boxes are micro-batches"] = timeline(
                plan, trace, trace.steps[-3], lanes=("compute",)
            )
    apart = max(abs(a[1] - b[1]) for a, b in zip(lines["single"], lines["1f1b"], strict=True))
    stale = max(abs(a[1] - b[1]) for a, b in zip(lines["single"], lines["pipedream"], strict=True))
    return Exhibit(
        lecture="001",
        title="PipeDream beside 1F1B",
        idea="1F1B with a flush ends every step with an empty pipeline, so all micro-batches of a step "
        "see one version of the weights. PipeDream never empties it: a stage updates after each "
        "micro-batch's backward and keeps the version with which its forward was made. No bubble, and "
        "gradients of weights that are a few updates old.",
        numbers=[
            Number(what="largest difference of losses, 1f1b to one process", ours=f"{apart:.1e}"),
            Number(
                what="largest difference of losses, pipedream to one process",
                ours=f"{stale:.1e}",
                note="stale weights, by design",
            ),
            Number(what="accuracy, 1f1b", ours=scores["1f1b"]),
            Number(what="accuracy, pipedream", ours=scores["pipedream"]),
        ],
        tables=[
            Table(title="Digits, 6 epochs", columns=["plan", "last loss", "accuracy", "waiting"], rows=rows)
        ],
        pictures=pictures | {"Losses": curves("loss by step", lines, x="step", y="loss")},
        seen="1F1B is exact. PipeDream updates four times as often, once a micro-batch, and takes "
        "another path, and states its bound: a gradient is at most as many updates old as there are "
        "stages behind it.",
    )


if __name__ == "__main__":
    show(exhibit())
