"""DeepSpeed's stages, lecture 004: what a device holds under ZeRO 0 to 3, what is sent, and what fits where.

python -m examples.lectures.lecture004_deepspeed
"""

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import bars

import plait
from plait.cluster.parse import parse_cluster
from plait.search.choose.subject import subject_of_paper
from plait.search.predict.sketch import Sketcher

PLANS = {
    "ddp": ("ddp", "none"),
    "zero1": ("zero1", "none"),
    "zero2": ("zero2", "none"),
    "zero3": ("zero3", "none"),
    "ddp, host": ("ddp", "optimizer"),
    "zero3, host": ("zero3", "optimizer"),
}
"""Everything on every device; optimizer state shared out; gradients too; weights too; optimizer state on the host."""
GPUS, CLUSTER = 8, "8xA100-40"
MODELS = {
    "1.3 B": (24, 2048, 16),
    "2.7 B": (32, 2560, 32),
    "6.7 B": (32, 4096, 32),
    "13 B": (40, 5120, 40),
    "30 B": (48, 7168, 56),
}
"""Layers, hidden, heads."""


def exhibit() -> Exhibit:
    cluster = parse_cluster(CLUSTER)
    shown: dict[str, dict[str, float]] = {}
    rows: list[list[float | str]] = []
    for size, (layers, hidden, heads) in MODELS.items():
        subject = subject_of_paper(f"gpt:layers={layers},hidden={hidden},heads={heads},seq=1024", batch=GPUS)
        sketcher = Sketcher(subject.costs(tensor=1, sequence=False), cluster, subject.state)
        row: list[float | str] = [size]
        for name, (base, offload) in PLANS.items():
            plan = plait.resolve(base, GPUS, {"memory": {"recompute": "full", "offload": offload}})
            made = sketcher.predict(plan, micro_batch=1, batch=GPUS)
            row.append(f"{made.memory.total / 2**30:.0f} GiB" + ("" if made.fits else ", too much"))
            if size == "2.7 B":
                memory = made.memory
                shown[name] = {
                    "weights": memory.parameters / 2**30, "gradients": memory.gradients / 2**30,
                    "optimizer": memory.optimizer / 2**30,
                    "activations and buffers": (memory.activations + memory.buffers + memory.overhead) / 2**30,
                }  # fmt: skip
        rows.append(row)
    states = {name: sum(list(parts.values())[:3]) for name, parts in shown.items()}
    return Exhibit(
        lecture="004",
        title="DeepSpeed's stages and offload: what fits where",
        idea="Data parallelism cannot train a model that does not fit one device. DeepSpeed's ZeRO "
        "shares out what replicas repeat: optimizer state (stage 1), gradients (2), weights (3), "
        "gathered when they are needed. The lecture's slide goes one further and keeps parameters and "
        "optimizer state in the host's memory: `memory.offload`.",
        numbers=[
            Number(what="2.7 B on 8 GPUs: weights, gradients and state, ddp, GiB", ours=states["ddp"]),
            Number(what="the same under zero3", ours=states["zero3"]),
            Number(
                what="ratio", lecture="up to 8, the number of devices", ours=states["ddp"] / states["zero3"]
            ),
        ],
        tables=[
            Table(
                title=f"Memory a device needs on {CLUSTER}, one sequence of 1,024 each, recomputing",
                columns=["GPT", *PLANS],
                rows=rows,
            )
        ],
        pictures={
            "A device's memory by stage, GPT with 2.7 billion parameters": bars(
                "memory of a device", shown, unit="GiB"
            )
        },
        seen="Each row is a prediction by the rule that refuses runs before they start. The last two columns keep the "
        "optimizer's state in the host's memory: it is fetched part by part, and each part is updated while the "
        "backward goes on. What does not fit even so is refused with what it needs.",
    )


if __name__ == "__main__":
    show(exhibit())
