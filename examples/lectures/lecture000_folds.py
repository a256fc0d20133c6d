"""Copies of the whole data, lecture 000: hyper-parameters and folds, tried side by side.

python -m examples.lectures.lecture000_folds
"""

import tempfile
from pathlib import Path

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves

import plait

JOB = Path(__file__).parents[1] / "digits_mlp.py"
FOLDS, STEPS = 3, 60
RATES = (0.001, 0.01, 0.1, 1.0)


def exhibit() -> Exhibit:
    with tempfile.TemporaryDirectory(prefix="plait-lecture-") as folder:
        tuned = plait.tune(
            str(JOB),
            changes=plait.Changes(args={"lr": list(RATES)}),
            tries=plait.Tries(folds=FOLDS, metric="accuracy"),
            steps=STEPS,
            out=Path(folder) / "tried",
        )
    assert tuned.best is not None and tuned.command is not None
    by_rate = sorted(tuned.tried, key=lambda one: float(one.args["lr"]))
    return Exhibit(
        lecture="000",
        title="Copies of the data: hyper-parameters and folds",
        idea="The lecture's first option for distribution: every worker has all of the data and trains "
        "on its own, with other hyper-parameters or on another fold. Done often in practice and, as it "
        "says, mostly as easy as it sounds: `plait try`.",
        numbers=[
            Number(what="runs, side by side on this machine's cores", ours=float(len(RATES) * FOLDS)),
            Number(what="best learning rate", ours=float(tuned.best.args["lr"])),
            Number(what="its accuracy over folds", ours=tuned.best.mean, note=f"spread {tuned.best.spread:.4f}"),
        ],
        tables=[
            Table(
                title=f"{STEPS} steps, {FOLDS} folds each",
                columns=["lr", "mean accuracy", "spread", *(f"fold {at}" for at in range(FOLDS))],
                rows=[
                    [float(one.args["lr"]), f"{one.mean:.3f}", f"{one.spread:.3f}", *(f"{s:.3f}" for s in one.scores)]
                    for one in by_rate
                ],
            )
        ],
        pictures={
            "Mean accuracy over the folds": curves(
                "accuracy by learning rate", {"mean of folds": [(float(o.args["lr"]), o.mean) for o in by_rate]},
                x="learning rate", y="accuracy", log_x=True,
            )
        },
        seen="No fold is trained on its own test part. Then one command trains the winner on all of the "
        "data, under any plan.",
    )  # fmt: skip


if __name__ == "__main__":
    show(exhibit())
