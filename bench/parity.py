"""Does every pipeline compute what one process computes? Every model, schedule, number of micro-batches and of ranks.

    python -m bench.parity [--models gpt hf_t5] [--micro-batches 1 4 7] [--ranks 2 4] [--processes 8]

In: what to run; by default all 648 cases, of which the tests run a sample. Out: a line for every model and number of
micro-batches, with the largest difference of a gradient; exits 1 where a case differs by more than DESIGN's tolerance
for float64, or by a bit where no sum changes its order. All ranks of a case are in one process, on ragged micro-batches
with dropout; processes work on different models.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from tests.unit.run.pipeline.pipelines import NAMES, SCHEDULES, compare, differences


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model with one number of micro-batches, under every schedule and number of ranks."""

    name: str
    micro_batches: int
    cases: int
    same_bits: int
    """Cases without any difference."""
    largest: float
    """The largest difference of a gradient."""
    failures: tuple[str, ...]
    seconds: float


def run(work: tuple[str, int, tuple[int, ...]]) -> Row:
    """All schedules of a model."""
    torch.set_num_threads(1)
    name, micro_batches, ranks = work
    began, same, largest, failures = time.perf_counter(), 0, 0.0, []
    cases = [(schedule, size) for schedule in SCHEDULES for size in ranks]
    for schedule, size in cases:
        try:
            found = differences(compare(name, schedule, size, micro_batches))
        except Exception as error:  # told below; the others go on
            failures.append(f"{schedule} on {size} ranks: {type(error).__name__}: {error}")
        else:
            same += not found
            largest = max(largest, found.get("gradient", 0.0))
    return Row(
        name=name,
        micro_batches=micro_batches,
        cases=len(cases),
        same_bits=same,
        largest=largest,
        failures=tuple(failures),
        seconds=time.perf_counter() - began,
    )


def show(rows: Sequence[Row], number: int) -> None:
    """The last row, and how far all are."""
    row = rows[-1]
    equal = row.cases - len(row.failures)
    print(
        f"[{len(rows)}/{number}] {row.name}, {row.micro_batches} micro-batches: {equal} of {row.cases} equal, "
        f"{row.same_bits} to the bit, largest difference {row.largest:.1e}, {row.seconds:.0f} s",
        flush=True,
    )
    for failure in row.failures:
        print(f"    FAILED {failure}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 7])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    work = [
        (name, number, tuple(given.ranks))
        for number in given.micro_batches
        for name in reversed(given.models)
    ]
    rows: list[Row] = []
    with get_context("spawn").Pool(given.processes) as pool:
        for row in pool.imap_unordered(run, work):
            rows.append(row)
            show(rows, len(work))
    failed, cases = sum(len(row.failures) for row in rows), sum(row.cases for row in rows)
    print(f"{cases - failed} of {cases} equal one process, {sum(row.same_bits for row in rows)} to the bit")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
