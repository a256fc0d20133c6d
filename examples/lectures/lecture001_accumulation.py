"""Gradient accumulation without synchronization, lecture 001's `no_sync`: fewer messages, the same step.

python -m examples.lectures.lecture001_accumulation
"""

import statistics

import torch
from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.runs import trained
from torch import nn
from torch.utils.data import TensorDataset

import plait

NETWORK = "bandwidth=400Mbit,latency=3ms,hosts=2x1"
WIDTH, BATCH, MICRO = 512, 256, 4


def job(batch: int, accumulate: int, steps: int) -> plait.Job:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)
    )
    return plait.Job(
        model=lambda: nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10)
        ),
        data=data,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=batch,
        accumulate=accumulate,
        steps=steps,
        shuffle=False,
    )


def run(batch: int, accumulate: int, steps: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Seconds for 256 samples, bytes of gradients that a rank reduced for them, the weights after `steps`."""
    with trained(job(batch, accumulate, steps), "ddp", 2, trial=plait.Trial(emulate=NETWORK)) as result:
        trace = plait.read_run(result.folder).trace
        assert trace is not None
        seconds = statistics.median(line["step_s"] for line in result.history[2:] if "step_s" in line)
        own = next(totals for totals in trace.totals if totals.rank == 0)
        sent = own.num_bytes / own.num_steps
        return seconds * BATCH / batch, sent * BATCH / batch, result.weights


def exhibit() -> Exhibit:
    whole_s, whole_bytes, whole = run(BATCH, 1, 8)
    slices_s, slices_bytes, slices = run(BATCH, MICRO, 8)
    each_s, each_bytes, _ = run(BATCH // MICRO, 1, 8 * MICRO)
    apart = max((whole[name] - slices[name]).abs().max().item() for name in whole)
    rows: list[list[float | str]] = [
        ["256 at once", 1, f"{1e3 * whole_s:.0f} ms", f"{whole_bytes / 2**20:.1f} MiB"],
        [
            f"{MICRO} slices, one synchronization",
            1,
            f"{1e3 * slices_s:.0f} ms",
            f"{slices_bytes / 2**20:.1f} MiB",
        ],
        [f"{MICRO} small steps", MICRO, f"{1e3 * each_s:.0f} ms", f"{each_bytes / 2**20:.1f} MiB"],
    ]
    return Exhibit(
        lecture="001",
        title="Accumulate first, synchronize once",
        idea="With `no_sync`, DDP adds up the gradients of several micro-batches on each process and "
        "reduces them with the last. A batch that does not fit is trained in slices, and what is sent "
        "does not grow with their number. In plait it is `accumulate=4` of the job, or "
        "`with model.no_sync():` in a loop of your own.",
        numbers=[
            Number(
                what="largest difference of a weight, slices to the whole batch, 8 steps", ours=f"{apart:.1e}"
            ),
            Number(
                what="bytes reduced, 4 small steps to accumulation",
                lecture="4",
                ours=each_bytes / slices_bytes,
            ),
            Number(what="time for 256 samples, the same", ours=each_s / slices_s),
        ],
        tables=[
            Table(
                title=f"256 samples on two processes, {NETWORK}",
                columns=["how", "updates", "time", "reduced"],
                rows=rows,
            )
        ],
        seen="Slices give the whole batch's step to rounding. Small steps synchronize four times as "
        "often, and on a slow link take accordingly longer.",
    )


if __name__ == "__main__":
    show(exhibit())
