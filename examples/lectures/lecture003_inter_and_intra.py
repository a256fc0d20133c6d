"""Inter- and intra-operator parallelism, lecture 003's trade-off table with measured columns.

python -m examples.lectures.lecture003_inter_and_intra
"""

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import timeline
from examples.lectures.runs import trained
from torch import nn
from torch.utils.data import TensorDataset

import plait
from plait.report.breakdown import breakdown

WIDTH, BATCH, STEPS, RANKS = 768, 256, 6, 2


def job(accumulate: int = 1) -> plait.Job:
    """Y = X W1 W2, four times: the lecture's example."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    ]
    return plait.Job(
        model=lambda: nn.Sequential(*layers),
        data=TensorDataset(x, x.flip(1)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=BATCH,
        accumulate=accumulate,
        steps=STEPS,
    )


def measured(plan: str, accumulate: int = 1) -> tuple[float, float, str]:
    """Bytes that a rank exchanges in a step, the share of time in which it does not compute, the timeline."""
    with trained(job(accumulate), plan, RANKS) as result:
        trace = plait.read_run(result.folder).trace
    assert trace is not None
    parts = breakdown(trace)
    sent = sum(part.communicated_bytes / part.num_steps for part in parts) / len(parts)
    idle = sum(part.share("idle_s") + part.share("exposed_communication_s") for part in parts) / len(parts)
    return sent, idle, timeline(f"{plan}, one step", trace, STEPS - 2)


def exhibit() -> Exhibit:
    inter_bytes, inter_idle, inter = measured("naive")
    piped_bytes, piped_idle, piped = measured("1f1b", 8)
    intra_bytes, intra_idle, intra = measured("megatron")
    return Exhibit(
        lecture="003",
        title="Inter- and intra-operator parallelism: the trade-off, measured",
        idea="Operators may be given to different devices (inter), which then send activations from one "
        "to the next and wait for each other; or every operator may be cut (intra), which keeps all "
        "devices busy and needs collective communication. The lecture's table says less against more; "
        "here it has numbers.",
        numbers=[
            Number(what="bytes, intra to inter", lecture="more", ours=intra_bytes / inter_bytes),
            Number(what="device idle time, inter", lecture="more", ours=inter_idle),
            Number(what="device idle time, intra", lecture="less", ours=intra_idle),
        ],
        tables=[
            Table(
                title="Two processes, measured",
                columns=["", "inter-op (naive)", "inter-op (1f1b, 8 micro-batches)", "intra-op (megatron)"],
                rows=[
                    [
                        "Communication a step",
                        *(f"{b / 2**20:.2f} MiB" for b in (inter_bytes, piped_bytes, intra_bytes)),
                    ],
                    ["Device idle time", *(f"{i:.0%}" for i in (inter_idle, piped_idle, intra_idle))],
                ],
            )
        ],
        pictures={"inter-op, one batch": inter, "inter-op, eight micro-batches": piped, "intra-op": intra},
        seen="The signs are the lecture's. Idle time counts waiting for the other process, also for a "
        "sum that is on its way.",
    )


if __name__ == "__main__":
    show(exhibit())
