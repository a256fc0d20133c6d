"""The backend by operation table of lecture 002, every cell tried; on what this machine lacks, elsewhere before.

python -m examples.lectures.lecture002_backends
"""

import json
from pathlib import Path
from typing import Any

from examples.lectures.exhibit import Exhibit, Number, Table, show

from plait.run.measure.links.backend_table import BACKENDS, OPERATIONS, try_backends

LECTURE = {
    "gloo": [
        "send",
        "recv",
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "barrier",
    ],
    "mpi": [
        "send",
        "recv",
        "broadcast",
        "all_reduce",
        "reduce",
        "all_gather",
        "gather",
        "scatter",
        "all_to_all",
        "barrier",
    ],
}
"""What the lecture ticks for processors; nccl has none there."""
RECORDED = Path(__file__).with_name("lecture002_backends_recorded.json")
"""What the same function found on a machine with a GPU, with where and when."""


def exhibit() -> Exhibit:
    tried = {(one.backend, one.operation): one for one in try_backends(2)}
    record: dict[str, Any] = json.loads(RECORDED.read_text())

    def cell(backend: str, operation: str) -> str:
        one = tried[backend, operation]
        now = {True: "yes", False: "no", None: "untried"}[one.works]
        before = record["works"].get(backend, {}).get(operation)
        if one.works is None and before is not None:
            return ("yes" if before else "no") + " (recorded)"
        if backend not in LECTURE:
            return now
        then = "yes" if operation in LECTURE[backend] else "no"
        return now if one.works is None or now == then else f"{now} (lecture: {then})"

    untried = sorted({(one.backend, one.why) for one in tried.values() if one.works is None})
    recorded = [backend for backend, _ in untried if backend in record["works"]]
    agree = sum(
        tried[b, o].works == (o in LECTURE[b])
        for b in LECTURE
        for o in OPERATIONS
        if tried[b, o].works is not None
    )
    asked = sum(tried[b, o].works is not None for b in LECTURE for o in OPERATIONS)
    return Exhibit(
        lecture="002",
        title="Which backend can do which operation",
        idea="The lecture's table says what gloo, MPI and NCCL can do, on processors and on GPUs. It "
        "ages with every release, so each cell is tried on two processes here: the operation runs and "
        "its result is checked. `plait links` prints the same.",
        numbers=[
            Number(what="cells for processors that are as the lecture says", ours=f"{agree} of {asked} tried")
        ],
        tables=[
            Table(
                title="Two processes: on processors, nccl on a GPU",
                columns=["operation", *BACKENDS],
                rows=[
                    [operation, *(cell(backend, operation) for backend in BACKENDS)]
                    for operation in OPERATIONS
                ],
            )
        ],
        seen="gloo has learned reduce_scatter and all_to_all since the lecture. "
        + " ".join(f"{backend} was not tried here: {why.rstrip('.')}." for backend, why in untried)
        + "".join(
            f" What stands for {backend} is the record ({RECORDED.name}) of the same trial on {record['where']}, "
            f"on {record['when']}."
            for backend in recorded
        ),
    )


if __name__ == "__main__":
    show(exhibit())
