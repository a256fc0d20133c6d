"""Locked, asynchronous and Hogwild updates compared, lecture 004.

python -m examples.lectures.lecture004_locked_async_hogwild
"""

from dataclasses import replace

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import curves
from examples.lectures.runs import trained
from examples.sparse_verses import job

import plait

PLANS = {
    "server-sync": ("all wait for each other", 3),
    "server-async": ("one gradient at a time, under the server's lock", 3),
    "hogwild": ("no lock", 2),
}
"""What they do, and ranks for two workers."""
STEPS = 150


def exhibit() -> Exhibit:
    lines, rows, speed, scores = {}, [], {}, {}
    for plan, (what, ranks) in PLANS.items():
        shortened = replace(job(), epochs=None, steps=STEPS, evaluate_every=STEPS)
        with trained(shortened, plan, ranks, saving=plait.Saving(trace=False)) as result:
            seen = [line for line in result.history if "samples_per_s" in line]
            scores[plan] = result.evaluation["accuracy"]
            speed[plan] = sum(line["samples_per_s"] for line in seen[len(seen) // 2 :]) / len(
                seen[len(seen) // 2 :]
            )
            lines[plan] = [(float(line["step"]), line["loss"]) for line in seen]
        rows.append([plan, what, f"{speed[plan]:,.0f}", f"{scores[plan]:.3f}"])
    return Exhibit(
        lecture="004",
        title="Locked, asynchronous, Hogwild",
        idea="A parameter server may wait for all workers, or take one worker's gradient at a time under "
        "a lock; Hogwild removes the lock and lets all workers write to one model at once. Where "
        "gradients are sparse, updates seldom meet, so little is lost.",
        numbers=[
            Number(
                what="speed of server-async to server-sync", ours=speed["server-async"] / speed["server-sync"]
            ),
            Number(what="speed of hogwild to server-async", ours=speed["hogwild"] / speed["server-async"]),
            Number(what="accuracy, locked and in step", ours=scores["server-sync"]),
            Number(what="accuracy without any lock", ours=scores["hogwild"]),
        ],
        tables=[
            Table(
                title=f"Sparse logistic regression on verses, two workers, {STEPS} steps",
                columns=["plan", "updates", "samples/s", "accuracy"],
                rows=rows,
            )
        ],
        pictures={"Loss by step": curves("loss", lines, x="step", y="loss")},
        seen="Two workers and a server share two cores here, so a server costs a third of the machine; "
        "Hogwild has none.",
    )


if __name__ == "__main__":
    show(exhibit())
