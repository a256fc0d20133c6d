"""Training on Spark: `plait.spark.train(job, session, "ddp", 4, data=frame)`.

In: a session, a job, perhaps a DataFrame. Out: what the run left. The job travels with cloudpickle, as Spark's own
functions do; each rank reads the partition that Spark gave to its task, and nothing is collected at the driver.
"""

import base64
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from plait.errors import DataError, RunError, UsageError
from plait.job.job import Job
from plait.job.order import SampleOrder
from plait.plan.named import resolve
from plait.run.engines.host import Shipped
from plait.run.engines.spark import SparkTask, run_on, spark, variables

__all__ = ["Rows", "SparkResult", "train"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparkResult:
    """What a run on Spark gave."""

    losses: tuple[float, ...]
    evaluation: Mapping[str, float]
    folder: Path
    """The run folder, on the host of the first task."""
    stopped: str | None


class Rows(torch.utils.data.Dataset[Any]):
    """The rows of this task's partition, at the places of the samples that its rank takes.

    The samples of a step are dealt to ranks in shares; the rows of each partition fill those of its rank, in order.
    What other ranks take is not here: where a plan is prepared, a row of this partition stands for it.
    """

    def __init__(self, order: SampleOrder, counts: Sequence[int], own: int, rows: Sequence[Any]) -> None:
        self._rows = rows
        self._places: dict[int, int] = {}
        for step in range(order.num_batches_per_epoch):
            for place in order.of_shares(step, len(counts))[own]:
                self._places[place] = len(self._places)
        self._size = order.num_samples

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._rows[self._places.get(index, index % len(self._rows)) % len(self._rows)]


def rows_here(job: Job, sample: Callable[[dict[str, Any]], Any]) -> Job:
    """The job on the rows that Spark gave to this task; in the order of the partitions, which Spark has shuffled."""
    about = json.loads(os.environ["PLAIT_ROWS"])
    counts = about["counts"]
    if min(counts) < 1:
        raise DataError(f"a partition of the DataFrame has no rows: {counts}.", fix="use fewer ranks.")
    rows = []
    with Path(about["path"]).open("rb") as file:
        for number in range(counts[about["own"]]):
            row = pickle.load(file)
            try:
                rows.append(sample(row))
            except Exception as error:
                raise DataError(
                    f"row {number} of partition {about['own']} of the DataFrame gave no sample: "
                    f"{type(error).__name__}: {error} (columns {', '.join(row)}; null: "
                    f"{', '.join(name for name in row if row[name] is None) or 'none'}).",
                    fix="drop or fill such rows, or give `sample`, which makes a sample of a row.",
                ) from error
    total = len(counts) * min(counts)
    if about["own"] == 0 and sum(counts) > total:
        warnings.warn(
            f"{sum(counts) - total} of {sum(counts)} rows are left out: partitions have {min(counts)} to {max(counts)} "
            "rows, and each rank takes as many as the shortest has.",
            stacklevel=2,
        )
    order = SampleOrder(num_samples=total, batch=job.batch, accumulate=job.accumulate, shuffle=False)
    return replace(job, data=Rows(order, counts, about["own"], rows), shuffle=False)


def tensors(row: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The columns of a row as tensors, in their order."""
    return tuple(torch.tensor(value) for value in row.values())


def train(
    job: Job | str,
    session: Any,
    plan: str = "ddp",
    ranks: int | None = None,
    *,
    data: Any = None,
    sample: Callable[[dict[str, Any]], Any] = tensors,
    out: str | Path | None = None,
    arguments: Sequence[str] = (),
) -> SparkResult:
    """Train `job` in barrier tasks of a Spark session, one a rank; `arguments` are more of `plait run`.

    `data`, a DataFrame, is what it is trained on, `sample` makes a sample of a row. Of partitions that differ by a row
    the longer ones lose it. It is for plans that share samples among all ranks, such as ddp and zero3.
    """
    spark()
    count = ranks if ranks is not None else session.sparkContext.defaultParallelism
    chosen = resolve(plan, count)
    if data is not None and chosen.data_ranks != chosen.ranks:
        raise UsageError(
            f"plan {plan} on {count} ranks gives the same samples to several of them; of a DataFrame each rank reads "
            "its own partition.",
            fix="use ddp, zero1, zero2 or zero3.",
        )
    packed = base64.b64encode(cloudpickle.dumps((job, sample))).decode()
    shipped: Shipped | None = None
    if data is None and isinstance(job, str):
        word, shipped = job, Shipped.of([job])
    else:
        if isinstance(job, str):
            raise UsageError(
                "with a DataFrame, give the job itself.", fix="call your function: train(job(), ...)."
            )
        with_rows = "spark.rows_here(made, sample)" if data is not None else "made"
        text = (
            "import base64, cloudpickle\nfrom plait import spark\n"
            f"made, sample = cloudpickle.loads(base64.b64decode({packed!r}))\n"
            f"def job():\n    return {with_rows}\n"
        )
        word, shipped = "plait_spark_job.py", Shipped(word="plait_spark_job.py", content=text.encode())
    folder = ["--out", str(Path(out).absolute())] if out is not None else []
    command = ("run", word, "--plan", plan, "--ranks", str(count), "--json", *folder, *arguments)
    ended = run_on(session, SparkTask(arguments=command, shipped=shipped, variables=variables()), count, data)
    first = ended[0]
    if first.code:
        raise RunError(f"the run on Spark ended with exit status {first.code}:\n{first.said.rstrip()}")
    told = json.loads(first.said.rstrip().splitlines()[-1])
    return SparkResult(
        losses=tuple(told["losses"]), evaluation=told["evaluation"], folder=Path(told["folder"]),
        stopped=told["stopped"],
    )  # fmt: skip
