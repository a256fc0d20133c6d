"""Pipelines beside one process and beside torch.distributed.pipelining: time, idle share, activations.

In: how many repetitions to measure. Out: tables with the bars, `ok` or `MISSED` beside each; with `--assert` it exits 1
where one is missed. See bench/README.md for how systems are measured in turn.

    python -m bench.pipeline [--parts steps slept memory] [--pairs 10] [--json FILE] [--assert]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.data_parallel import run_torchrun
from bench.pipeline_ranks import CPU, MICRO_BATCHES, PLANS, transformer_job
from plait.job.data.open import open_data
from plait.plan.named import resolve
from plait.program.cost.memory import step_memory
from plait.run.prepare.programs import Programs

PARTS = ("steps", "slept", "memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One thing that was measured."""

    part: str
    what: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the bars are met, or there are none."""
        low = self.least is None or self.value >= self.least
        return low and (self.most is None or self.value <= self.most)

    @property
    def bar(self) -> str:
        """The bars, and whether they are met."""
        wanted = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", self.least), ("<=", self.most))
            if bound is not None
        ]
        return f"{' and '.join(wanted)} {'ok' if self.holds else 'MISSED'}" if wanted else ""


def measure(part: str, pairs: int, ranks: int) -> dict[str, Any]:
    """Run `bench.pipeline_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        command = ["-m", "bench.pipeline_ranks", "--part", part, "--repeats", str(pairs), "--out", str(out)]
        run_torchrun(command, ranks)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def ratio(times: dict[str, Any], over: str, under: str) -> float:
    """Median of one system's time over another's, of blocks that were measured one after the other."""
    pairs = zip(times["seconds"][over], times["seconds"][under], strict=True)
    return statistics.median(a / b for a, b in pairs)


def steps(pairs: int) -> list[Row]:
    """2 ranks that compute."""
    times = measure("steps", pairs, 2)
    part = f"2 ranks, {MICRO_BATCHES['steps']} micro-batches"
    rows = [
        Row(
            part=part,
            what=f"{name}: speed-up over one process",
            value=ratio(times, "single", name),
            unit="x",
            least=1.65 if name == "1f1b" else None,
        )
        for name in (*PLANS, "torch 1F1B", "torch GPipe")
    ]
    for ours, other in (("1f1b", "torch 1F1B"), ("gpipe", "torch GPipe")):
        value, bar = ratio(times, ours, other), 1.0 if ours == "1f1b" else None
        rows.append(Row(part=part, what=f"{ours}: time over {other}'s", value=value, unit="x", most=bar))
    value = ratio(times, "zero-bubble", "1f1b")
    rows.append(Row(part=part, what="zero-bubble: time over 1f1b's", value=value, unit="x", most=1.03))
    rows += _idle(part, times)
    return rows


def _idle(part: str, times: dict[str, Any]) -> list[Row]:
    return [
        Row(part=part, what=f"{name}: idle share of the ranks", value=100 * share, unit="%")
        for name, share in times["idle"].items()
    ]


def slept(pairs: int) -> list[Row]:
    """4 ranks that sleep for as long as each segment is said to take."""
    times = measure("slept", pairs, 4)
    part = f"4 ranks that sleep, {MICRO_BATCHES['slept']} micro-batches"
    value = ratio(times, "zero-bubble", "1f1b")
    return [
        Row(part=part, what="zero-bubble: time over 1f1b's", value=value, unit="x", most=0.95),
        *_idle(part, times),
    ]


def memory(pairs: int) -> list[Row]:
    """Peak of the activations of the first rank, from the program, in micro-batches.

    What one micro-batch keeps for its backward is what `gpipe`'s peak grows by with each; what a backward needs beside
    it, gradients above all, is the rest of `naive`'s: it is told, and left out of what has a bar.
    """
    rows = []
    for ranks in (2, 4):
        part = f"activations at their peak, {ranks} ranks, 16 micro-batches"
        kept = (_peak("gpipe", ranks, 16) - _peak("gpipe", ranks, 8)) / 8
        rest = _peak("naive", ranks, 16) - kept
        for name, wanted in (("1f1b", ranks), ("gpipe", 16), ("zero-bubble", None), ("zero-bubble-2", None)):
            peak = _peak(name, ranks, 16)
            rows.append(
                Row(
                    part=part,
                    what=f"{name}: micro-batches in memory",
                    value=(peak - rest) / kept,
                    least=None if wanted is None else 0.9 * wanted,
                    most=None if wanted is None else 1.1 * wanted,
                )
            )
            what = f"{name}: with what one backward needs beside them"
            rows.append(Row(part=part, what=what, value=peak / kept))
    return rows


@cache
def _peak(plan: str, ranks: int, micro_batches: int) -> int:
    job = transformer_job(micro_batches)
    programs = Programs(job, open_data(job.data, job.collate), resolve(plan, ranks), CPU)
    return step_memory(programs.full_step(), 0).activations


def show(rows: list[Row], console: Console) -> None:
    """A table of each part."""
    for part in dict.fromkeys(row.part for row in rows):
        table = Table("what", "value", "bar", title=part)
        for row in rows:
            if row.part == part:
                table.add_row(row.what, f"{row.value:.2f} {row.unit}".strip(), row.bar)
        console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=10, help="interleaved repetitions")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--assert", dest="strict", action="store_true", help="exit 1 where a bar is missed")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"torch {torch.__version__}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    rows: list[Row] = []
    for part in given.parts:
        found = {"steps": steps, "slept": slept, "memory": memory}[part](given.pairs)
        show(found, console)
        rows += found
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) | {"holds": row.holds} for row in rows], indent=1))
    return 1 if given.strict and not all(row.holds for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
