"""How long GPT-3 takes to train, lecture 000: its own extrapolation, and predictions for named clusters.

python -m examples.lectures.lecture000_gpt3_days
"""

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import bars

import plait

TOKENS, SEQUENCE, BATCH = 300e9, 2048, 1536
"""What GPT-3 was trained on (Brown et al. 2020), and the batch that Narayanan et al. 2021 train it with."""
CLUSTERS = ("128x8xA100", "128x8xH100", "16x8xH100")
"""Hosts x GPUs a host."""
PUBLISHED_DAYS = 34.0
"""GPT-3 on 1,024 A100, as Narayanan et al. 2021 estimate from their measured 140 TFLOP/s a GPU."""


def exhibit() -> Exhibit:
    rows, shown, days = [], {}, {}
    for name in CLUSTERS:
        choice = plait.choose(
            model="gpt3-175b:seq=2048", cluster=name, batch=BATCH, search=plait.Search(seconds=15.0, top=3)
        )
        best = choice.best
        days[name] = TOKENS / (BATCH * SEQUENCE) * best.step_s / 86400
        mesh = ", ".join(f"{axis}={size}" for axis, size in best.plan.mesh.axes if size > 1)
        rows.append([name, mesh, f"{best.step_s:.1f} s", f"{best.utilization:.0%}", f"{days[name]:.1f}"])
        shown[name] = {"days": days[name]}
    ratio = 175 / 0.33
    return Exhibit(
        lecture="000",
        title="How long does GPT-3 take to train?",
        idea="From BERT-large's 399 minutes on one K80 and a model 530 times as large, the lecture "
        "extrapolates 212 thousand minutes, 147 days, for the same data. GPT-3 was trained on far more "
        "data by far more devices; plait searches the best plan for a cluster by name and predicts the "
        "days.",
        numbers=[
            Number(what="175 billion over 330 million", lecture=530, ours=ratio),
            Number(what="minutes for the same data on one K80", lecture="212k", ours=399 * ratio),
            Number(what="the same in days", lecture=147, ours=399 * ratio / 60 / 24),
            Number(
                what="days on 1,024 A100 for 300 billion tokens",
                ours=days["128x8xA100"],
                note=f"Narayanan et al. 2021 estimate {PUBLISHED_DAYS:.0f} from measured steps",
            ),
        ],
        tables=[
            Table(
                title=f"300 billion tokens, batch {BATCH}, the best plan that plait finds",
                columns=["cluster", "plan", "step", "of peak", "days"],
                rows=rows,
            )
        ],
        pictures={"Days for 300 billion tokens": bars("GPT-3, predicted", shown, unit="days")},
        seen="The lecture's extrapolation holds tokens fixed and assumes that one K80 could hold the "
        "model, which needs 2.8 TB with its optimizer; its 147 days are arithmetic, not a plan. The "
        f"command for one row: `plait plan --model gpt3-175b --cluster 128x8xA100 --batch {BATCH}`.",
    )


if __name__ == "__main__":
    show(exhibit())
