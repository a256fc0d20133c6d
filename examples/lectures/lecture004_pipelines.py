"""GPipe, 1F1B and PipeDream in the lecture's own layout: a row a device, a box a micro-batch's forward or backward.

python -m examples.lectures.lecture004_pipelines
"""

from examples.lectures.exhibit import Exhibit, Number, Table, show
from examples.lectures.pictures import timeline

from plait.program.simulate.schedule_clock import bubble_rate, durations, program_of_schedule
from plait.program.simulate.simulator import simulate
from plait.program.stage.schedules import SCHEDULES
from plait.program.stage.schedules.base import Costs, peak_in_flight

DEVICES, MICRO_BATCHES = 4, 8
BATCHES = 3
"""Batches of PipeDream, whose pipeline is never emptied between them."""
SHOWN = {
    "naive": "one device works at a time",
    "gpipe": "all forwards, then all backwards, then the update (the lecture's figure 1)",
    "1f1b": "a backward as soon as there is one; an update after the flush",
    "pipedream": "forwards and backwards in turn, no flush between three batches (the lecture's figure 2)",
    "interleaved": "two thin stages a device",
    "zero-bubble": "gradients of weights fill the gaps",
}


def exhibit() -> Exhibit:
    rows: list[list[float | str]] = []
    pictures, bubbles = {}, {}
    for name, what in SHOWN.items():
        per_device = 2 if name == "interleaved" else 1
        # PipeDream is 1F1B over batch after batch: nobody waits for an update, each micro-batch is one
        order, count = ("1f1b", BATCHES * MICRO_BATCHES) if name == "pipedream" else (name, MICRO_BATCHES)
        actions = SCHEDULES[order](DEVICES, per_device, count)
        costs = Costs(forward=1 / per_device, input=1 / per_device, weight=1 / per_device)
        trace = simulate(program_of_schedule(name, actions), durations(costs))
        bubbles[name] = bubble_rate(trace)
        rows.append([name, f"{bubbles[name]:.1%}", max(peak_in_flight(actions))])
        pictures[f"{name}: {what}"] = timeline(name, trace, trace.steps[0], lanes=("compute",))
    counted = (DEVICES - 1) / (MICRO_BATCHES + DEVICES - 1)
    return Exhibit(
        lecture="004",
        title="GPipe, 1F1B, PipeDream: who works when",
        idea="Model parallelism lets one device work at a time; cut into micro-batches, a batch flows "
        "through the stages like water. Schedules differ in when backwards run: that decides the bubble "
        "and how many micro-batches a device must remember.",
        numbers=[
            Number(what="bubble of GPipe, (p - 1)/(m + p - 1)", ours=bubbles["gpipe"], lecture=counted),
            Number(
                what="bubble of PipeDream over 3 batches, filled and emptied once",
                ours=bubbles["pipedream"],
                lecture=(DEVICES - 1) / (BATCHES * MICRO_BATCHES + DEVICES - 1),
            ),
            Number(
                what="bubble of 1F1B, the same, with less to remember", ours=bubbles["1f1b"], lecture=counted
            ),
        ],
        tables=[
            Table(
                title=f"{DEVICES} devices, {MICRO_BATCHES} micro-batches",
                columns=["schedule", "bubble", "micro-batches in flight on a device"],
                rows=rows,
            )
        ],
        pictures=pictures,
        seen="Each picture is the trace of plait's simulator over the very program that the processes "
        "would run; [naive and pipelined](lecture000_naive_then_pipelined.md) and "
        "[PipeDream](lecture001_pipedream.md) show measured ones.",
    )


if __name__ == "__main__":
    show(exhibit())
